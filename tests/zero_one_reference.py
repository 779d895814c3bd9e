"""Test helper: 0/1 Adam in float64, for ranks that each have a gradient of one vector.

Lu et al., 0/1 Adam, 2022, algorithm 1; at stages 1 and 2 the messages of compression/one_bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from one_bit_reference import BETA1, BETA2, EPS, Reference
from torch import Tensor


@dataclass
class ZeroOneReference(Reference):
    """As the base class; errors are in the unit of gradients. `freeze_step` is var_freeze_step.

    copies: what each rank computes with. They differ between two synchronisations.
    """

    var_update_scaler: int = 2
    local_step_scaler: int = 3
    local_step_clipper: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.copies = [self.master.clone() for _ in range(self.num_ranks)]
        self.interval, self.counter, self.seen = 1, 0, 0
        self.local_interval, self.local_counter = 1, 0
        self.apart: list[Tensor] = []  # the momentum of each rank
        self.sums: list[Tensor] = []
        self.rates, self.kept, self.num_apart = 0.0, 1.0, 0

    def _means(self, sent: list[Tensor]) -> Tensor:
        """What all ranks receive of the mean of `sent`, in the unit of gradients."""
        total = self._exchanged(sent)
        if self.stage > 0:
            return total
        total = total + self.server
        found = torch.cat([self.compressed(chunk) for chunk in self._chunks(total)])
        self.server = total - found
        return found

    def _root(self) -> Tensor:
        return (self.v / (1 - BETA2**self.seen)).sqrt() + EPS

    def step(self, grads: list[Tensor]) -> None:
        self.steps += 1
        grads = [grad.double() for grad in grads]
        if self.steps <= self.freeze_step:
            self._step_before_freeze(grads)
        elif self.local_interval > 1:
            self._local_step(grads)
        elif self.stage > 0:
            self._send_momenta(grads)
            self._move()
        else:
            self._average_momenta(grads)
            self._move()
        if self.steps > self.freeze_step:
            self.local_counter += 1
            if self.local_counter == self.local_step_scaler:
                self.local_counter = 0
                self.local_interval = min(2 * self.local_interval, self.local_step_clipper)

    def _average_momenta(self, grads: list[Tensor]) -> None:
        momenta = [BETA1 * self.m / (1 - BETA1) + grad for grad in grads]
        self.m = (1 - BETA1) * self._means(momenta)

    def _step_before_freeze(self, grads: list[Tensor]) -> None:
        if self.steps % self.interval:
            if self.stage == 0:
                self._average_momenta(grads)
            else:
                self.m = BETA1 * self.m + (1 - BETA1) * self._means(grads)
            self._move()
            self.m[self.v == 0] = 0
            return
        mean = torch.stack(grads).mean(0)
        self.m = BETA1 * self.m + (1 - BETA1) * mean
        self.v = BETA2 * self.v + (1 - BETA2) * mean**2
        self.seen += 1
        change = self.m / (1 - BETA1**self.steps) / self._root() + self.decay * self.master
        if self.seen < self.steps:
            change = (change - self.decay * self.master).clamp(-self.most, self.most)
            change = (change + self.decay * self.master) * (self.v > 0)
        self.master = self.master - self.lr * change
        self._publish(self.master.clone())
        self.counter += 1
        if self.counter == self.var_update_scaler:
            self.counter, self.interval = 0, 2 * self.interval

    def _move(self) -> None:
        change = (self.m / (1 - BETA1**self.steps) / self._root()).clamp_(-self.most, self.most)
        change += self.decay * self.master
        change[self.v == 0] = 0
        self.master = self.master - self.lr * change
        if self.stage == 0:
            self._publish(self.master.clone())
            return
        difference = self.master - self.copies[0]
        moved = self._packed(difference, self.master)
        moved[self.v == 0] = 0
        self._publish(self.copies[0] + moved)

    def _publish(self, values: Tensor) -> None:
        self.copies = [values.clone() for _ in range(self.num_ranks)]

    def _local_step(self, grads: list[Tensor]) -> None:
        if not self.num_apart:
            self.apart = [self.m.clone() for _ in grads]
            self.sums = [torch.zeros_like(self.m) for _ in grads]
            self.rates, self.kept = 0.0, 1.0
        rate = self.lr / (1 - BETA1**self.steps)
        for rank, grad in enumerate(grads):
            self.apart[rank] = BETA1 * self.apart[rank] + (1 - BETA1) * grad
            change = rate * self.apart[rank] / self._root()
            change.clamp_(-self.lr * self.most, self.lr * self.most)
            change += self.lr * self.decay * self.copies[rank]
            change[self.v == 0] = 0
            self.copies[rank] = self.copies[rank] - change
            self.sums[rank] += rate * self.apart[rank]
        self.rates += rate
        self.kept *= 1 - self.lr * self.decay
        self.num_apart += 1
        if self.num_apart >= self.local_interval:
            self.synchronise()

    def synchronise(self) -> None:
        """Bring the ranks together."""
        if not self.num_apart:
            return
        factor = self.num_apart / self.rates / (1 - BETA1)
        mean = (1 - BETA1) * self._means([one * factor for one in self.sums]) / self.num_apart
        change = (mean / self._root()).clamp_(-self.most, self.most)
        moved = self.master * self.kept - self.rates * change
        self.master = torch.where(self.v == 0, self.master, moved)
        self.m = mean
        self._publish(self.master.clone())
        self.num_apart = 0
