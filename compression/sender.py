"""How the parameters of a flat buffer are sent, as an object that is chosen once; exact by default.

gather     a shard of each rank, dropped between uses (stage 3)      -> the full buffer
publish    the new values of each rank's shard after an update       -> the full buffer (stages 1, 2)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..ops.comm.handles import Handle


class ParamSender(ABC):
    """Sends the values of one flat buffer to the ranks of its group."""

    @property
    @abstractmethod
    def keeps_master(self) -> bool:
        """The updated values need memory of their own: what the ranks compute with may differ from them."""

    @property
    @abstractmethod
    def sends_differences(self) -> bool:
        """`publish` sends the difference to what all ranks hold, now."""

    @property
    @abstractmethod
    def rounds(self) -> bool:
        """What `gather` fills in is near the shards, and they stay exact."""

    @abstractmethod
    def gather(self, flat: Tensor, shard: Tensor) -> Handle:
        """Start to fill `flat` [world_size * n] with every rank's `shard` [n], which may be part of it."""

    @abstractmethod
    def publish(self, flat: Tensor, values: Tensor) -> Handle:
        """Start to move `flat` [world_size * n] to every rank's `values` [n], where it `sends_differences`.

        `flat` has equal values on all ranks before and after it.
        """

    @abstractmethod
    def take_written(self, flat: Tensor, shard: Tensor, start: int, stop: int) -> None:
        """Set elements [start, stop) of `shard` [n] to what a script wrote to this rank's part of `flat`."""

    @abstractmethod
    def keep(self, flat: Tensor) -> None:
        """The gathered `flat` is about to be dropped."""

    @abstractmethod
    def forget(self) -> None:
        """The shards have changed, or a gather was not for all ranks: for all ranks between two gathers."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes that are kept between gathers."""


@final
class ExactSender(ParamSender):
    """Sends the values themselves: (world_size - 1) shards per rank, in the parameters' dtype."""

    keeps_master = False
    sends_differences = False
    rounds = False
    held_bytes = 0

    def __init__(self, collectives: Collectives, buffer: int) -> None:
        """buffer: the number of the flat buffer."""
        self._collectives = collectives
        self._buffer = buffer

    def gather(self, flat: Tensor, shard: Tensor) -> Handle:
        return self._collectives.all_gather(flat, shard, buffer=self._buffer, kind="all_gather")

    def publish(self, flat: Tensor, values: Tensor) -> Handle:
        raise AssertionError("exact values are gathered")

    def take_written(self, flat: Tensor, shard: Tensor, start: int, stop: int) -> None:
        shard[start:stop].copy_(self._collectives.shard_of(flat)[start:stop])

    def keep(self, flat: Tensor) -> None:
        return

    def forget(self) -> None:
        return


__all__ = ["ExactSender", "ParamSender"]
