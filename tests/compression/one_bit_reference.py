"""Test helper: 1-bit Adam in float64, for ranks that each have a gradient of one vector.

Tang et al., 1-bit Adam, 2021, algorithm 1; at stages 1 and 2 the messages of compression/one_bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK = 1024
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


@dataclass
class Reference:
    """The state of all ranks. `master` and `copy` [n]: what is updated, and what all compute with.

    margin: the smallest value that was packed, relative to its block's mean magnitude, or to a tenth of what
    it is a difference of. Where it is tiny, fp32 may find the other sign.
    """

    master: Tensor
    num_ranks: int
    freeze_step: int
    stage: int
    lr: float
    decay: float = 0.0
    steps: int = 0
    copy: Tensor = field(init=False)
    margin: float = math.inf
    is_handed_over: bool = False

    def __post_init__(self) -> None:
        self.master = self.master.double().clone()
        self.copy = self.master.clone()
        self.m, self.v = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.errors = [torch.zeros_like(self.master) for _ in range(self.num_ranks)]
        self.server = torch.zeros_like(self.master)

    def compressed(self, values: Tensor, near: Tensor | None = None) -> Tensor:
        """Each block as its signs times its mean magnitude. near: the values are differences of such ones."""
        packed = []
        near = torch.zeros_like(values) if near is None else near
        for block, other in zip(values.split(BLOCK), near.split(BLOCK), strict=True):
            mean = block.abs().mean()
            margins = block.abs() / (mean + other.abs() / 10)
            if bool(mean):
                self.margin = min(self.margin, float(margins[block != 0].min()))
            packed.append(torch.where(torch.signbit(block), -mean, mean))
        return torch.cat(packed)

    def _chunks(self, values: Tensor) -> list[Tensor]:
        return list(values.chunk(self.num_ranks))

    def _packed(self, difference: Tensor, near: Tensor) -> Tensor:
        """All chunks of a `difference` of values that are like `near`."""
        chunks = zip(self._chunks(difference), self._chunks(near), strict=True)
        return torch.cat([self.compressed(chunk, other) for chunk, other in chunks])

    def _exchanged(self, sent: list[Tensor]) -> Tensor:
        """The mean over ranks of what each sends, which keeps its error."""
        total = torch.zeros_like(self.master)
        for rank, values in enumerate(sent):
            values = values + self.errors[rank]
            packed = torch.cat([self.compressed(chunk) for chunk in self._chunks(values)])
            self.errors[rank] = values - packed
            total += packed / self.num_ranks
        return total

    def _send_momenta(self, grads: list[Tensor]) -> None:
        """Stages 1 and 2: each rank sends (1 - b) of its buffer, which has its momentum and its error.

        At the freeze the owner of a chunk adds b / (1 - b) times its momentum, as a sum over ranks.
        """
        if not self.is_handed_over:
            self.is_handed_over = True
            momentum = self._chunks(self.m * (self.num_ranks * BETA1 / (1 - BETA1)))
            for rank, error in enumerate(self.errors):
                self._chunks(error)[rank].add_(momentum[rank])
        self.m = torch.zeros_like(self.master)
        for rank, grad in enumerate(grads):
            values = self.errors[rank] + grad
            packed = torch.cat([self.compressed(chunk) for chunk in self._chunks(values)])
            self.errors[rank] = values - (1 - BETA1) * packed
            self.m += (1 - BETA1) * packed / self.num_ranks

    @property
    def most(self) -> float:
        """Kingma and Ba, Adam, 2015, section 2.1: the most that a step changes an element, in rates."""
        return float(max(1.0, (1 - BETA1) / (1 - BETA2) ** 0.5))

    def _advance(self, grads: list[Tensor]) -> bool:
        """Update both moments by the gradient [n] of each rank; whether the variance is frozen."""
        self.steps += 1
        grads = [grad.double() for grad in grads]
        is_frozen = self.steps > self.freeze_step
        if not is_frozen:
            mean = torch.stack(grads).mean(0)
            self.m = BETA1 * self.m + (1 - BETA1) * mean
            self.v = BETA2 * self.v + (1 - BETA2) * mean**2
        elif self.stage == 0:
            momenta = [BETA1 * self.m + (1 - BETA1) * grad for grad in grads]
            total = self._exchanged(momenta) + self.server
            self.m = torch.cat([self.compressed(chunk) for chunk in self._chunks(total)])
            self.server = total - self.m
        else:
            self._send_momenta(grads)
        self.root = (self.v / (1 - BETA2 ** min(self.steps, self.freeze_step))).sqrt() + EPS
        return is_frozen

    def _share(self, is_frozen: bool) -> None:
        """Send the parameters that ranks compute with."""
        if is_frozen and self.stage > 0:
            self.copy = self.copy + self._packed(self.master - self.copy, self.master) * (
                self.v > 0
            )
        else:
            self.copy = self.master.clone()

    def step(self, grads: list[Tensor]) -> None:
        """One step with the gradient [n] of each rank."""
        is_frozen = self._advance(grads)
        change = self.m / (1 - BETA1**self.steps) / self.root
        if is_frozen:
            change.clamp_(-self.most, self.most)
        change = self.lr * (change + self.decay * self.master)
        if is_frozen:
            change[self.v == 0] = 0
        self.master = self.master - change
        self._share(is_frozen)


@dataclass
class LambReference(Reference):
    """1-bit LAMB (Li et al., 2021, algorithm 1) of a model with one parameter. `ratio`: the mean of ratios."""

    coeff_beta: float = 0.9
    limits: tuple[float, float] = (0.5, 4.0)
    threshold: float = 0.1
    ratio: float = 0.0
    last: float = 1.0

    def step(self, grads: list[Tensor]) -> None:
        before = self.m
        is_frozen = self._advance(grads)
        if not is_frozen:
            self.fresh = self.v.clone()
        moves = self.v > 0 if is_frozen else torch.ones_like(self.v, dtype=torch.bool)
        plain = self.m / (1 - BETA1**self.steps) / self.root * moves
        if is_frozen:
            plain.clamp_(-self.most, self.most)
        direction = (plain + self.decay * self.master) * moves
        if is_frozen:
            grad = (self.m - BETA1 * before) / (1 - BETA1)
            self.fresh = BETA2 * self.fresh + (1 - BETA2) * grad**2
            other = (self.fresh / (1 - BETA2**self.steps)).sqrt() + EPS
            found = float((self.root / other)[moves].max())
            share = min(1.0, float(plain.norm() / direction.norm()))
            found = found * share + 1 - share
            found = min(max(found, self.limits[0]), self.limits[1])
            low, high = self.last * (1 - self.threshold), self.last * (1 + self.threshold)
            self.last = min(max(found, low), high)
            rate = self.lr * self.ratio * self.last
        else:
            ratio = min(max(float(self.master.norm() / direction.norm()), 0.01), 10.0)
            self.ratio = self.coeff_beta * self.ratio + (1 - self.coeff_beta) * ratio
            rate = self.lr * ratio
        self.master = self.master - rate * direction
        self._share(is_frozen)
