"""Host memory as the place of masters, states, shards and sums of gradients, with its copies to the device.

    sum of one reduction ──to_host──> sum of the step [n] ──> update ──> Sender ──to_device──> parameters
    shard ──to_device──> its slice of the gathered buffer

The first sum of a step is copied in its own dtype, so one reduction of 16-bit gradients takes 2 bytes an
element. Later ones are added in the dtype of sums. A sum never has more bits than that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from .lanes import Lanes, Outbox
from .pinned import host_memory
from .places import (
    Blocks,
    Done,
    Home,
    Mark,
    Near,
    Residence,
    Shard,
    ShardHome,
    StateHome,
    StatesInMemory,
    SumHome,
    Ticket,
)
from .spare import Spare

# so many units the host may be behind the device in adding before backward waits for it
NUM_STAGES = 4
NUM_BUFFERS = 2  # of the sender


@final
class Rotation:
    """Owns the buffers, pinned if `pin`; they grow to the largest size asked for. For one thread."""

    def __init__(self, num_buffers: int, *, pin: bool) -> None:
        self._pin = pin
        self._buffers = [host_memory(0, pin=False) for _ in range(num_buffers)]
        self._readers: list[Ticket] = [Done() for _ in range(num_buffers)]
        self._next = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An undefined [numel] tensor. Waits for the reader that its buffer had before."""
        at = self._next
        self._readers[at].wait()
        need_bytes = numel * dtype.itemsize
        if self._buffers[at].numel() < need_bytes:
            self._buffers[at] = host_memory(need_bytes, pin=self._pin)
        return self._buffers[at][:need_bytes].view(dtype)

    def lend(self, reader: Ticket) -> None:
        """The tensor that `take` returned last is read until `reader` is done."""
        self._readers[self._next] = reader
        self._next = (self._next + 1) % len(self._buffers)

    def release(self) -> None:
        """Free the buffers, which nobody reads any more."""
        self._buffers = [host_memory(0, pin=False) for _ in self._buffers]
        self._readers = [Done() for _ in self._buffers]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.numel() for buffer in self._buffers)


@final
class Sender:
    """Sends new parameter values to the device through a few pinned buffers, which it owns.

    update writes buffer 0 ──to_device──> parameters      meanwhile the next update writes buffer 1

    Used by one thread: the one that runs the updates.
    """

    def __init__(self, lanes: Lanes, *, pin: bool) -> None:
        self._lanes = lanes
        self._buffers = Rotation(NUM_BUFFERS, pin=pin)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An undefined [numel] tensor to write values to, for the next `send`."""
        return self._buffers.take(numel, dtype)

    def send(
        self,
        values: Tensor,
        target: Tensor,
        after: Mark | None = None,
    ) -> Ticket:
        """Start to copy `values`, the tensor that `buffer` returned last, to `target` [numel].

        after: see `Lane.run`.
        """
        ticket = self.copy(values, target, after)
        self._buffers.lend(ticket)
        return ticket

    def copy(self, values: Tensor, target: Tensor, after: Mark | None = None) -> Ticket:
        """The same for `values` in other memory of the host."""
        return self._lanes.to_device.run(lambda: target.copy_(values, non_blocking=True), after)

    def release(self) -> None:
        """Free the buffers, when all is sent."""
        self._buffers.release()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers."""
        return self._buffers.allocated_bytes


@final
class OnHost(SumHome):
    """The sum is in host memory, pinned if `pin`. Its memory is allocated once."""

    is_on_host = True

    def __init__(
        self,
        lanes: Lanes,
        outbox: Outbox,
        stages: Rotation,
        sum_dtype: torch.dtype,
        *,
        adds: bool,
        pin: bool,
    ) -> None:
        """
        Args:
            stages: buffers for copies that are converted or added on the host afterwards.
            adds: a step usually has several reductions, so the sum has `sum_dtype` from the start.
        """
        self._lanes = lanes
        self._outbox = outbox
        self._stages = stages
        self._sum_dtype = sum_dtype
        self._adds = adds
        self._pin = pin
        self._memory: Tensor | None = None
        self._sum: Tensor | None = None
        self._writer: Ticket = Done()  # the last one of the memory
        self._adder: Ticket = Done()  # the last one that is work of the host
        self._reader: Ticket = Done()
        self._replacing: Ticket = Done()

    def add(self, source: Tensor, give_back: Callable[[], None]) -> None:
        if self._sum is None:
            is_wider = source.dtype.itemsize > self._sum_dtype.itemsize
            dtype = self._sum_dtype if self._adds or is_wider else source.dtype
            self._sum = self._allocate(source.numel(), dtype)
            self._copy(self._sum, source, give_back)
        else:
            if self._sum.dtype != self._sum_dtype:
                self.widened()
            self._add(self._sum, source, give_back)

    def _copy(self, target: Tensor, source: Tensor, give_back: Callable[[], None]) -> None:
        if target.dtype == source.dtype or source.device.type == "cpu":
            self._directly(lambda: target.copy_(source, non_blocking=True), give_back)
        else:
            self._staged(source, target.copy_, give_back)

    def _add(self, target: Tensor, source: Tensor, give_back: Callable[[], None]) -> None:
        if source.device.type == "cpu":
            self._directly(lambda: target.add_(source), give_back)
        else:
            self._staged(source, target.add_, give_back)

    def _directly(self, copy: Callable[[], Tensor], give_back: Callable[[], None]) -> None:
        self._writer = self._lanes.to_host.run(copy)
        self._outbox.add(self._writer, give_back)

    def _staged(
        self, source: Tensor, then: Callable[[Tensor], Tensor], give_back: Callable[[], None]
    ) -> None:
        """Copy `source` to host memory of its dtype first: a copy between devices must not convert.

        Waits for the host only if all stages hold values that are not added yet.
        """
        stage = self._stages.take(source.numel(), source.dtype)
        copied = self._lanes.to_host.run(lambda: stage.copy_(source, non_blocking=True))
        earlier = self._writer

        def work() -> None:
            earlier.wait()
            copied.wait()
            then(stage)

        self._writer = self._adder = self._lanes.updates.run(work)
        self._stages.lend(self._writer)
        self._outbox.add(copied, give_back)

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        # copies of the lane come after each other, but not after work of the host
        for ticket in (self._reader, self._adder):
            ticket.wait()
        self._reader = self._adder = Done()
        need_bytes = numel * dtype.itemsize
        if self._memory is None or self._memory.numel() < need_bytes:
            self._memory = host_memory(need_bytes, pin=self._pin)
        return self._memory[:need_bytes].view(dtype)

    def widened(self) -> Tensor:
        narrow = self.total()
        assert narrow is not None and self._sum is not None
        if narrow.dtype != self._sum_dtype:  # until `reset`; later copies need the pinned memory
            self._sum = narrow.to(self._sum_dtype)
        return self._sum

    def put(self, total: Tensor) -> None:
        self.total()
        self._sum = self._allocate(total.numel(), total.dtype)
        self._sum.copy_(total)

    def replace(self, total: Tensor) -> None:
        target = self._sum = self._allocate(total.numel(), total.dtype)
        self._writer = self._lanes.to_host.run(lambda: target.copy_(total, non_blocking=True))
        self._replacing = self._writer

    def order(self) -> None:
        self._replacing.order()
        self._replacing = Done()

    def total(self) -> Tensor | None:
        writer, self._writer = self._writer, Done()
        writer.wait()
        return self._sum

    def arriving(self) -> tuple[Tensor, Ticket]:
        assert self._sum is not None
        return self._sum, self._writer

    def lend(self, ticket: Ticket) -> None:
        self._reader = ticket

    def reset(self) -> None:
        self.order()
        self._sum = None

    def release(self) -> None:
        self._sum = self._memory = None

    @property
    def host_bytes(self) -> int:
        kept = 0 if self._memory is None else self._memory.numel()
        is_wider = self._sum is not None and self._sum.nbytes > kept
        return kept + (self._sum.nbytes if is_wider and self._sum is not None else 0)


@final
class ShardOnHost(Shard):
    """Memory of the host."""

    is_on_host = True
    is_on_disk = False

    def __init__(self, tensor: Tensor, lanes: Lanes) -> None:
        self.tensor = tensor
        self._lanes = lanes

    def bring(self) -> None:
        return

    def fetch(self, target: Tensor, after: Ticket | None) -> Ticket:
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


@final
class ShardsOnHost(ShardHome):
    """Host memory, pinned if `pin`."""

    is_on_host = True

    def __init__(self, lanes: Lanes, *, pin: bool) -> None:
        self._lanes = lanes
        self._pin = pin

    def store(self, index: int, values: Tensor, near: Near) -> Shard:
        memory = host_memory(values.numel() * values.element_size(), pin=self._pin)
        return ShardOnHost(memory.view(values.dtype).copy_(values), self._lanes)


class HostHome(Home):
    """Host memory, with what its users share: lanes, the outbox of gradients and the sender of parameters."""

    is_on_host = True

    def __init__(
        self,
        device: torch.device,
        *,
        pin: bool,
        adds: bool,
        guesses: bool = False,
        states: StateHome | None = None,
    ) -> None:
        """
        Args:
            states: where masters and states are between updates; default: in host memory.
            pin: use pinned memory for copies; without effect where the device is a CPU.
            adds: a step has several reductions.
            guesses: updates run before it is known that their step will not be clipped or skipped.
        """
        self.device = device
        self.pin = pin and device.type == "cuda"
        self.lanes = Lanes.of(device)
        self.sender = Sender(self.lanes, pin=self.pin)
        self._outbox = Outbox()
        self._stages = Rotation(NUM_STAGES, pin=self.pin)
        self._adds = adds
        self.spare = Spare(pin=self.pin) if guesses else None
        self.states = states or StatesInMemory()

    def store(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to("cpu", dtype, copy=True)

    def residence(self, index: int, master: Tensor, *, holds_master: bool) -> Residence:
        return self.states.residence(index, master, holds_master=holds_master)

    def sums(self, sum_dtype: torch.dtype) -> SumHome:
        shared = (self.lanes, self._outbox, self._stages)
        return OnHost(*shared, sum_dtype, adds=self._adds, pin=self.pin)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory for copies, for states on a disk, and for updates that may be undone."""
        spare = 0 if self.spare is None else self.spare.allocated_bytes
        copies = self.sender.allocated_bytes + self._stages.allocated_bytes
        return copies + spare + self.states.host_bytes

    def drain(self) -> None:
        """Give back all device buffers whose copies are in flight."""
        self._outbox.drain()

    def close(self) -> None:
        """End the threads."""
        self.lanes.close()
        self.states.close()

    def release(self) -> None:
        """After `close`: free the buffers for copies."""
        self.drain()
        self.sender.release()
        self._stages.release()
        if self.spare is not None:
            self.spare.release()


__all__ = ["NUM_BUFFERS", "HostHome", "OnHost", "Rotation", "Sender", "ShardOnHost", "ShardsOnHost"]
