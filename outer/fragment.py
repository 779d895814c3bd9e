"""A fragment of the model: its outer parameters, their momentum, and the meetings of the groups over it.

    start    outer gradient = outer - parameters       ──> job: mean over groups, outer optimizer
    finish   waits for the job                         ──> mix x parameters + (1 - mix) x outer

    g = mean over groups of the outer gradients
    Nesterov         m = momentum m + g        outer -= lr (g + momentum m)
    SGD              m = momentum m + g        outer -= lr m

All tensors are flat, fp32 and on the host: each rank has those of its own elements.

Source: Douillard et al., DiLoCo, 2023, algorithm 1, https://arxiv.org/abs/2311.08105; the formulas are those
of torch.optim.SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..utils.errors import XdsError
from .config import Outer, OuterOptimizer
from .mean import EXACT_BITS, Mean, bytes_of_mean, padded_numel


class Job(Protocol):
    """What runs in the background."""

    def join(self) -> None: ...


@final
class Done:
    """A job that has ended."""

    def join(self) -> None:
        return


DONE = Done()


@final
class Fragment:
    """The states of one fragment on this rank.

    Attributes:
        outer, momentum, error: [n]; None: there is none. error: what messages have lost.
        weight: what this group counts for in the next mean: the items of its steps since the last meeting.
    """

    def __init__(
        self, number: int, numel: int, groups: int, *, momentum: bool, error: bool
    ) -> None:
        self.number, self.numel = number, numel
        self.size = padded_numel(numel, groups)
        self.outer = torch.zeros(self.size)
        self.momentum = torch.zeros(self.size) if momentum else None
        self.error = torch.zeros(self.size) if error else None
        self.weight = 0.0
        self._job: Job | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of all its tensors."""
        held = (self.outer, self.momentum, self.error)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def start(
        self, values: Tensor, meeting: Meeting, run: Callable[[Callable[[], None]], Job]
    ) -> None:
        """Start a meeting. values: the parameters of this group, [numel]. run: runs a job in the background."""
        weight, self.weight = self.weight, 0.0
        self._job = run(lambda: meeting.hold(self, self._grad(values), weight))

    @torch.no_grad()
    def _grad(self, values: Tensor) -> Tensor:
        grad = torch.zeros(self.size)
        torch.sub(self.outer[: self.numel], values, out=grad[: self.numel])
        return grad

    def settle(self) -> None:
        """Wait for the meeting that runs. Raises the error of its job."""
        job, self._job = self._job, None
        if job is not None:
            job.join()

    def mixed(self, values: Tensor, mix: float) -> Tensor:
        """The values that the parameters get, [numel]. values: those that they have."""
        self.settle()
        outer = self.outer[: self.numel]
        return outer if not mix else torch.lerp(outer, values, mix)


def held_bytes(section: Outer, numels: Sequence[int]) -> int:
    """Bytes of all fragments of these elements on a rank."""
    kinds = 1 + (section.optimizer.params.momentum > 0) + (section.bits < EXACT_BITS)
    return sum(4 * kinds * padded_numel(numel, section.groups) for numel in numels)


def round_bytes(section: Outer, numels: Sequence[int]) -> int:
    """Bytes that a rank sends to other groups while each fragment meets once."""
    groups, bits = section.groups, section.bits
    return sum(bytes_of_mean(padded_numel(numel, groups), groups, bits) for numel in numels)


@final
class OuterSgd:
    """Updates flat outer parameters, fp32 [n]."""

    def __init__(self, section: OuterOptimizer) -> None:
        self._lr, self._momentum = section.params.lr, section.params.momentum
        self._is_nesterov = section.type == "Nesterov"

    @property
    def has_momentum(self) -> bool:
        """It keeps a momentum of the size of the parameters."""
        return self._momentum > 0

    @torch.no_grad()
    def step(self, outer: Tensor, momentum: Tensor | None, grad: Tensor) -> None:
        """Update `outer` and `momentum`; `grad` is overwritten."""
        if momentum is not None:
            momentum.mul_(self._momentum).add_(grad)
            if self._is_nesterov:
                grad.add_(momentum, alpha=self._momentum)
            else:
                grad = momentum
        outer.sub_(grad, alpha=self._lr)


@final
class Meeting:
    """What the groups do in a meeting, in the order in which meetings start."""

    def __init__(self, groups: Collectives, mean: Mean, optimizer: OuterSgd) -> None:
        self._groups, self._mean, self._optimizer = groups, mean, optimizer

    @torch.no_grad()
    def hold(self, fragment: Fragment, grad: Tensor, weight: float) -> None:
        """Update the outer parameters by the mean of `grad`. For all groups. Sends 8 bytes beside the mean.

        Raises XdsError: a parameter of a group is not finite.
        """
        finite = bool(torch.isfinite(grad.sum()))
        mine = torch.tensor([weight if finite else torch.nan], dtype=torch.float64)
        table = self._groups.gather_small(mine, what="weights of groups").view(-1)
        lost = table.isnan().nonzero().view(-1).tolist()
        if lost:
            raise XdsError(
                f"the parameters of group {lost[0]} are not finite, so fragment {fragment.number} has no mean: "
                "load the last checkpoint, and lower the learning rate or set gradient_clipping"
            )
        total = float(table.sum())
        if not total:  # no group has taken a step
            return
        self._mean.of(grad, fragment.error, weight / total)
        self._optimizer.step(fragment.outer, fragment.momentum, grad)


__all__ = ["DONE", "Fragment", "Job", "Meeting", "OuterSgd", "held_bytes", "round_bytes"]
