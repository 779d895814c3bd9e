"""How the gradient of a flat buffer is reduced over the ranks, chosen once; exact by default.

    gradients of this rank [world_size * n] --reduce--> total [n] --gather (stage 0)--> sums [world_size * n]

A reducer belongs to one flat buffer: it may keep what it has not sent yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, final

from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..ops.comm.handles import Handle


@final
class Owed(NamedTuple):
    """What a rank has not sent of a flat buffer.

    error: [world_size * n] fp32, of its own gradients. server: [n] fp32, of its part of the sums; or None.
    unit: what the values are multiplied with to be mean gradients of the loss. steps: since they were 0, if
    that counts. holds_momentum: `error` also has b / (1 - b) times the momentum.
    """

    error: Tensor
    server: Tensor | None
    unit: float
    steps: int = 0
    holds_momentum: bool = False


class GradientReducer(ABC):
    """Reduces the gradients of all ranks to this rank's shard of their sum, and gathers the sums."""

    @property
    @abstractmethod
    def is_lossy(self) -> bool:
        """What is sent now is not exact; the rest is kept, and sent later."""

    @abstractmethod
    def reduce(self, flat: Tensor, out: Tensor, *, add: bool) -> Handle:
        """Start to set `out` to this rank's shard of the sum of `flat` over ranks, or to add it (`add`).

        Shapes:  flat [world_size * n], out [n]. `flat` must not be written before the handle's wait.
        """

    @abstractmethod
    def cross_replicas(self, total: Tensor) -> Handle | None:
        """Start to add to `total` [n] what `reduce` has left out: once, after the last `reduce` of a step.

        None: nothing has started; `total` is the sum over all ranks. More gradients may still be reduced, and
        are completed by another call.
        """

    @abstractmethod
    def reduce_whole(self, flat: Tensor, out: Tensor) -> tuple[Handle, Handle] | None:
        """Start `reduce` to `out`, and `gather` of `out` to `flat`, which begins when that is done.

        Shapes:  flat [world_size * n], out [n]: this rank's part of `flat`, or wider.
        None: nothing has started; a gather that is started later is as fast.
        """

    @abstractmethod
    def gather(self, total: Tensor, flat: Tensor) -> Handle:
        """Start to fill `flat` [world_size * n] with the `total` [n] of every rank.

        `total` may be this rank's part of `flat`. Neither may be written before the handle's wait.
        """

    @abstractmethod
    def keep(self, flat: Tensor) -> None:
        """Keep the gradients `flat` of a micro-batch for the next `reduce`. Only where `is_lossy`."""

    @abstractmethod
    def undo(self) -> None:
        """The step is skipped: what this rank has sent in it is owed again."""

    @abstractmethod
    def end_step(self) -> None:
        """The step is done, or skipped."""

    @property
    @abstractmethod
    def keeps_owed(self) -> bool:
        """Messages are lossy, now or later."""

    @property
    @abstractmethod
    def owed(self) -> Owed | None:
        """What was not sent; None: nothing."""

    @abstractmethod
    def restore(self, owed: Owed | None) -> None:
        """Replace what was not sent. For all ranks, which have all something or nothing."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes that are kept between steps."""


@final
class ExactReducer(GradientReducer):
    """The exact sum in rank order. Sends (world_size - 1) / world_size of `flat`'s bytes per rank."""

    is_lossy = False
    keeps_owed = False
    owed = None
    held_bytes = 0

    def __init__(self, collectives: Collectives, buffer: int, num_copies: int = 1) -> None:
        """
        Args:
            buffer: the number of the flat buffer.
            num_copies: so many ranks compute the same gradient, which counts once.
        """
        self._collectives = collectives
        self._buffer = buffer
        self._num_copies = num_copies

    def reduce(self, flat: Tensor, out: Tensor, *, add: bool) -> Handle:
        self._divide(flat)
        return self._collectives.reduce_scatter(
            flat, out, add=add, buffer=self._buffer, kind="reduce_scatter"
        )

    def cross_replicas(self, total: Tensor) -> Handle | None:
        return None

    def reduce_whole(self, flat: Tensor, out: Tensor) -> tuple[Handle, Handle] | None:
        if not self._collectives.sums_whole(flat, out):
            return None
        self._divide(flat)
        kinds = ("reduce_scatter", "all_gather")
        return self._collectives.sum_whole(flat, out, buffer=self._buffer, kinds=kinds)

    def gather(self, total: Tensor, flat: Tensor) -> Handle:
        own = self._collectives.shard_of(flat)
        if own.data_ptr() != total.data_ptr():
            own.copy_(total)
        return self._collectives.all_gather(flat, own, buffer=self._buffer, kind="all_gather")

    def keep(self, flat: Tensor) -> None:
        raise AssertionError("exact sums keep nothing")

    def undo(self) -> None:
        return

    def restore(self, owed: Owed | None) -> None:
        return

    def end_step(self) -> None:
        return

    def _divide(self, flat: Tensor) -> None:
        if self._num_copies > 1:
            flat.div_(self._num_copies)


__all__ = ["ExactReducer", "GradientReducer"]
