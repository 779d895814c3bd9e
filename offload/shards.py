"""Where this rank's shard of a flat buffer of parameters is stored at stage 3: device, host or disk.

shard ──to_device──> its slice of the gathered buffer ──all_gather──> the other slices
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import final

from torch import Tensor

from ..ops.comm.handles import Handle
from .lanes import Lanes, Ticket
from .pinned import host_memory
from .states import Blocks

Near = Callable[[Tensor], Tensor]  # values [n] -> a copy of them on the device


class Shard(ABC):
    """The shard of one flat buffer. `tensor` [n] stays the same object; on a disk it may read as NaN.

    is_on_host: it is not on the device. is_on_disk: its values come and go.
    """

    tensor: Tensor
    is_on_host: bool
    is_on_disk: bool

    @abstractmethod
    def bring(self) -> None:
        """`tensor` has its values on return, and may be written to. Raises XdsError: the disk failed."""

    @abstractmethod
    def fetch(self, target: Tensor, after: Ticket | None) -> Ticket:
        """Start to copy the values to `target` [n], on the device, when `after` is done."""

    @abstractmethod
    def begin_receive(self) -> None:
        """New values are about to come: those in memory count no more."""

    @abstractmethod
    def receive(self, values: Tensor) -> None:
        """On a disk: start to write `values` [n], which may change on return. In the thread of updates."""

    @abstractmethod
    def blocks(self) -> Blocks | None:
        """How the values are read while they are on a disk; None: in memory."""


@final
class ShardInMemory(Shard):
    """Memory of the device, or of the host with `lanes`."""

    is_on_disk = False

    def __init__(self, tensor: Tensor, lanes: Lanes | None = None) -> None:
        self.tensor = tensor
        self.is_on_host = lanes is not None
        self._lanes = lanes

    def bring(self) -> None:
        return

    def fetch(self, target: Tensor, after: Ticket | None) -> Ticket:
        assert self._lanes is not None, "the shard is on the device"

        def copy() -> None:
            if after is not None:
                after.wait()
            target.copy_(self.tensor, non_blocking=True)

        return self._lanes.to_device.run(copy)

    def begin_receive(self) -> None:
        return

    def receive(self, values: Tensor) -> None:
        raise AssertionError("the shard is in memory")

    def blocks(self) -> Blocks | None:
        return None


class ShardHome(ABC):
    """The place of shards."""

    is_on_host: bool
    is_on_disk = False

    @abstractmethod
    def store(self, index: int, values: Tensor, near: Near) -> Shard:
        """A copy of `values` [n], those of flat buffer `index`, at home.

        near: makes the copy, if home is the device.
        """

    def plan(self, index: int, numel: int, itemsize: int) -> None:
        """The shard of flat buffer `index` will have `numel` elements of `itemsize` bytes."""
        return

    def open(self) -> None:
        """Reserve the space for all that is planned.

        Raises:
            UsageError: there is too little space, or no right to write there.
        """
        return

    def hold(self) -> AbstractContextManager[None]:
        """Inside, everything that is brought stays in memory."""
        return nullcontext()

    def failure(self) -> str:
        """What has failed so far, for a message; "" if nothing has."""
        return ""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory through which shards travel."""
        return 0

    def close(self) -> None:
        """End threads and give up the space."""
        return


@final
class ShardsOnDevice(ShardHome):
    """The device."""

    is_on_host = False

    def store(self, index: int, values: Tensor, near: Near) -> Shard:
        return ShardInMemory(near(values))


@final
class ShardsOnHost(ShardHome):
    """Host memory, pinned if `pin`."""

    is_on_host = True

    def __init__(self, lanes: Lanes, *, pin: bool) -> None:
        self._lanes = lanes
        self._pin = pin

    def store(self, index: int, values: Tensor, near: Near) -> Shard:
        memory = host_memory(values.numel() * values.element_size(), pin=self._pin)
        return ShardInMemory(memory.view(values.dtype).copy_(values), self._lanes)


@final
class Fetched(Handle):
    """A gather of one rank: the copy of its shard."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket: Ticket | None = ticket

    def wait(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            ticket.order()


__all__ = ["Fetched", "Shard", "ShardHome", "ShardInMemory", "ShardsOnDevice", "ShardsOnHost"]
