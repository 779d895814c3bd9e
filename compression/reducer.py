"""How a unit's gradient travels: an object, chosen once. Exact is the default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..ops.comm.handles import Handle


class GradientReducer(ABC):
    """Turns every rank's flat gradient into this rank's shard of their sum."""

    @abstractmethod
    def reduce(self, flat: Tensor, out: Tensor, *, add: bool, buffer: int) -> Handle:
        """Start out = (out +) sum over ranks of `flat`, this rank's shard.

        Shapes:  flat [world_size * n], out [n]. `flat` may not be written before the handle's wait.
        """


@final
class ExactReducer(GradientReducer):
    """The plain sum in rank order. Sends (world_size - 1) / world_size of `flat`'s bytes a rank."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def reduce(self, flat: Tensor, out: Tensor, *, add: bool, buffer: int) -> Handle:
        return self._collectives.reduce_scatter(
            flat, out, add=add, buffer=buffer, kind="reduce_scatter"
        )
