"""Where this rank's shard of a flat buffer of parameters is stored at stage 3: on the device or on the host.

host shard ──to_device──> its slice of the gathered buffer ──all_gather──> the other slices
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor

from ..ops.comm.handles import Handle
from .lanes import Lanes, Ticket
from .pinned import host_memory


class ShardHome(ABC):
    """The place of shards."""

    is_on_host: bool

    @abstractmethod
    def store(self, values: Tensor) -> Tensor:
        """A copy of `values` [n] at home."""

    @abstractmethod
    def fetch(self, shard: Tensor, target: Tensor, after: Ticket | None) -> Ticket:
        """Start to copy `shard` to `target` [n], on the device, when `after` is done."""


@final
class ShardsOnDevice(ShardHome):
    """The device."""

    is_on_host = False

    def store(self, values: Tensor) -> Tensor:
        return values.clone()

    def fetch(self, shard: Tensor, target: Tensor, after: Ticket | None) -> Ticket:
        raise AssertionError("the shard is on the device")


@final
class ShardsOnHost(ShardHome):
    """Host memory, pinned if `pin`."""

    is_on_host = True

    def __init__(self, lanes: Lanes, *, pin: bool) -> None:
        self._lanes = lanes
        self._pin = pin

    def store(self, values: Tensor) -> Tensor:
        memory = host_memory(values.numel() * values.element_size(), pin=self._pin)
        return memory.view(values.dtype).copy_(values)

    def fetch(self, shard: Tensor, target: Tensor, after: Ticket | None) -> Ticket:
        def copy() -> None:
            if after is not None:
                after.wait()
            target.copy_(shard, non_blocking=True)

        return self._lanes.to_device.run(copy)


@final
class Fetched(Handle):
    """A gather of one rank: the copy of its shard."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket: Ticket | None = ticket

    def wait(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            ticket.order()


__all__ = ["Fetched", "ShardHome", "ShardsOnDevice", "ShardsOnHost"]
