"""The reduction of a unit's gradient over the ranks, as an object that is chosen once; exact by default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..ops.comm.handles import Handle


class GradientReducer(ABC):
    """Reduces the flat gradients of all ranks to this rank's shard of their sum."""

    @abstractmethod
    def reduce(self, flat: Tensor, out: Tensor, *, add: bool, buffer: int) -> Handle:
        """Start to set `out` to this rank's shard of the sum of `flat` over ranks, or to add it (`add`).

        Shapes:  flat [world_size * n], out [n]. `flat` must not be written before the handle's wait.
        """

    @abstractmethod
    def reduce_whole(self, flat: Tensor, *, buffer: int) -> Handle | None:
        """Start to set `flat` [world_size * n] to its sum over ranks, on every rank, with the bits of `reduce`.

        None: nothing has started; `reduce` and an all_gather of the shards are as fast.
        """


@final
class ExactReducer(GradientReducer):
    """The exact sum in rank order. Sends (world_size - 1) / world_size of `flat`'s bytes per rank."""

    def __init__(self, collectives: Collectives, num_copies: int = 1) -> None:
        """num_copies: so many ranks compute the same gradient, which counts once."""
        self._collectives = collectives
        self._num_copies = num_copies

    def reduce(self, flat: Tensor, out: Tensor, *, add: bool, buffer: int) -> Handle:
        self._divide(flat)
        return self._collectives.reduce_scatter(
            flat, out, add=add, buffer=buffer, kind="reduce_scatter"
        )

    def reduce_whole(self, flat: Tensor, *, buffer: int) -> Handle | None:
        if not self._collectives.sums_whole(flat):
            return None
        self._divide(flat)
        kinds = ("reduce_scatter", "all_gather")
        return self._collectives.sum_whole(flat, buffer=buffer, kinds=kinds)

    def _divide(self, flat: Tensor) -> None:
        if self._num_copies > 1:
            flat.div_(self._num_copies)
