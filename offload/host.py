"""Stores masters, states, shards and sums of gradients in host memory, with copies to the device.

    sum of one reduction ──to_host──> sum of the step [n] ──> update ──> ParamCopier ──to_device──> parameters
    shard ──to_device──> its slice of the gathered buffer

The first sum of a step is copied in its own dtype, so one reduction of 16-bit gradients takes 2 bytes an
element. Later ones are added in the dtype of sums. A sum never has more bits than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from ..ops.device import device_of
from .interfaces import (
    FinishedJob,
    GradStore,
    JobHandle,
    Mark,
    MasterStore,
    Shard,
    ShardStore,
    StateStorage,
    StateStore,
    ToDevice,
)
from .job_queues import JobQueues, PendingCopies
from .pinned import host_memory
from .undo_pool import UndoPool

# so many units the host may be behind the device in adding before backward waits for it
NUM_STAGES = 4
NUM_BUFFERS = 2  # of the copier


@final
class RotatingBuffers:
    """Owns the buffers, pinned if `pin`; they grow to the largest size asked for. For one thread."""

    def __init__(self, num_buffers: int, *, pin: bool) -> None:
        self._pin = pin
        self._buffers = [host_memory(0, pin=False) for _ in range(num_buffers)]
        self._readers: list[JobHandle] = [FinishedJob() for _ in range(num_buffers)]
        self._next = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An undefined [numel] tensor. Waits for the reader that its buffer had before."""
        number = self._next
        self._readers[number].wait()
        need_bytes = numel * dtype.itemsize
        if self._buffers[number].numel() < need_bytes:
            self._buffers[number] = host_memory(need_bytes, pin=self._pin)
        return self._buffers[number][:need_bytes].view(dtype)

    def set_reader(self, reader: JobHandle) -> None:
        """The tensor that `take` returned last is read until `reader` is done."""
        self._readers[self._next] = reader
        self._next = (self._next + 1) % len(self._buffers)

    def release(self) -> None:
        """Free the buffers, which nobody reads any more."""
        self._buffers = [host_memory(0, pin=False) for _ in self._buffers]
        self._readers = [FinishedJob() for _ in self._buffers]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.numel() for buffer in self._buffers)


@final
class ParamCopier:
    """Sends new parameter values to the device through a few pinned buffers, which it owns.

    update writes buffer 0 ──to_device──> parameters      meanwhile the next update writes buffer 1

    Used by one thread: the one that runs the updates.
    """

    def __init__(self, queues: JobQueues, *, pin: bool) -> None:
        self._queues = queues
        self._buffers = RotatingBuffers(NUM_BUFFERS, pin=pin)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An undefined [numel] tensor to write values to, for the next `send`."""
        return self._buffers.take(numel, dtype)

    def send(
        self,
        values: Tensor,
        target: Tensor,
        after: Mark | None = None,
    ) -> JobHandle:
        """Start to copy `values`, the tensor that `buffer` returned last, to `target` [numel].

        after: see `JobQueue.run`.
        """
        handle = self.copy(values, target, after)
        self._buffers.set_reader(handle)
        return handle

    def copy(self, values: Tensor, target: Tensor, after: Mark | None = None) -> JobHandle:
        """The same for `values` in other memory of the host."""
        return self._queues.to_device.run(lambda: target.copy_(values, non_blocking=True), after)

    def release(self) -> None:
        """Free the buffers, when all is sent."""
        self._buffers.release()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers."""
        return self._buffers.allocated_bytes


@final
class HostGradStore(GradStore):
    """The sum is in host memory, pinned if `pin`. Its memory is allocated once."""

    is_on_host = True

    def __init__(
        self,
        queues: JobQueues,
        pending_copies: PendingCopies,
        stages: RotatingBuffers,
        sum_dtype: torch.dtype,
        *,
        accumulates: bool,
        pin: bool,
    ) -> None:
        """
        Args:
            stages: buffers for copies that are converted or added on the host afterwards.
            accumulates: a step usually has several reductions, so the sum has `sum_dtype` from the start.
        """
        self._queues = queues
        self._pending_copies = pending_copies
        self._stages = stages
        self._sum_dtype = sum_dtype
        self._accumulates = accumulates
        self._pin = pin
        self._memory: Tensor | None = None
        self._sum: Tensor | None = None
        self._writer: JobHandle = FinishedJob()  # the last one of the memory
        self._adder: JobHandle = FinishedJob()  # the last one that is work of the host
        self._reader: JobHandle = FinishedJob()
        self._replacing: JobHandle = FinishedJob()

    def add(self, source: Tensor, give_back: Callable[[], None]) -> None:
        if self._sum is None:
            is_wider = source.dtype.itemsize > self._sum_dtype.itemsize
            dtype = self._sum_dtype if self._accumulates or is_wider else source.dtype
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
        self._writer = self._queues.to_host.run(copy)
        self._pending_copies.add(self._writer, give_back)

    def _staged(
        self, source: Tensor, then: Callable[[Tensor], Tensor], give_back: Callable[[], None]
    ) -> None:
        """Copy `source` to host memory of its dtype first: a copy between devices must not convert.

        Waits for the host only if all stages hold values that are not added yet.
        """
        stage = self._stages.take(source.numel(), source.dtype)
        copied = self._queues.to_host.run(lambda: stage.copy_(source, non_blocking=True))
        earlier = self._writer

        def work() -> None:
            earlier.wait()
            copied.wait()
            then(stage)

        self._writer = self._adder = self._queues.updates.run(work)
        self._stages.set_reader(self._writer)
        self._pending_copies.add(copied, give_back)

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        # copies of one queue are ordered among themselves, but not after work of the host
        for handle in (self._reader, self._adder):
            handle.wait()
        self._reader = self._adder = FinishedJob()
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
        self._writer = self._queues.to_host.run(lambda: target.copy_(total, non_blocking=True))
        self._replacing = self._writer

    def wait_on_device(self) -> None:
        self._replacing.wait_on_device()
        self._replacing = FinishedJob()

    def total(self) -> Tensor | None:
        writer, self._writer = self._writer, FinishedJob()
        writer.wait()
        return self._sum

    def pending_total(self) -> tuple[Tensor, JobHandle]:
        assert self._sum is not None
        return self._sum, self._writer

    def set_reader(self, handle: JobHandle) -> None:
        self._reader = handle

    def reset(self) -> None:
        self.wait_on_device()
        self._sum = None

    def release(self) -> None:
        self._sum = self._memory = None

    @property
    def host_bytes(self) -> int:
        allocated_bytes = 0 if self._memory is None else self._memory.numel()
        is_wider = self._sum is not None and self._sum.nbytes > allocated_bytes
        return allocated_bytes + (self._sum.nbytes if is_wider and self._sum is not None else 0)


@final
class HostShard(Shard):
    """Memory of the host."""

    is_on_host = True

    def __init__(self, tensor: Tensor, queues: JobQueues) -> None:
        super().__init__(tensor)
        self._queues = queues

    def fetch(self, target: Tensor, after: JobHandle | None) -> JobHandle:
        def copy() -> None:
            if after is not None:
                after.wait()
            target.copy_(self.tensor, non_blocking=True)

        return self._queues.to_device.run(copy)


@final
class HostShardStore(ShardStore):
    """Host memory, pinned if `pin`."""

    is_on_host = True

    def __init__(self, queues: JobQueues, *, pin: bool) -> None:
        self._queues = queues
        self._pin = pin

    def add(self, index: int, values: Tensor, to_device: ToDevice) -> Shard:
        memory = host_memory(values.numel() * values.element_size(), pin=self._pin)
        return HostShard(memory.view(values.dtype).copy_(values), self._queues)

    def coded(self, values: Tensor, exact: Sequence[tuple[int, int]]) -> Shard:
        from .coded import CodedShard

        return CodedShard(values, exact, self._queues.to_device, pin=self._pin)


class HostStore(MasterStore):
    """Host memory, with the queues, the buffers and the copier that its users share."""

    is_on_host = True

    def __init__(
        self,
        device: torch.device,
        *,
        pin: bool,
        accumulates: bool,
        speculates: bool = False,
        states: StateStore | None = None,
    ) -> None:
        """
        Args:
            states: where masters and states are between updates; default: in host memory.
            pin: use pinned memory for copies; without effect where the device is a CPU.
            accumulates: a step has several reductions.
            speculates: updates run before it is known that their step will not be clipped or skipped.
        """
        self.device = device
        self.pin = pin and device_of(device).pins_memory
        self.queues = JobQueues.of(device)
        self.copier = ParamCopier(self.queues, pin=self.pin)
        self._pending_copies = PendingCopies()
        self._stages = RotatingBuffers(NUM_STAGES, pin=self.pin)
        self._accumulates = accumulates
        self.undo_pool = UndoPool(pin=self.pin) if speculates else None
        self.states = states or StateStore()

    def copy_in(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to("cpu", dtype, copy=True)

    def state_storage(self, index: int, master: Tensor, *, holds_master: bool) -> StateStorage:
        return self.states.state_storage(index, master, holds_master=holds_master)

    def sums(self, sum_dtype: torch.dtype) -> GradStore:
        shared = (self.queues, self._pending_copies, self._stages)
        return HostGradStore(*shared, sum_dtype, accumulates=self._accumulates, pin=self.pin)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory for copies, for states on a disk, and for updates that may be undone."""
        undo_bytes = 0 if self.undo_pool is None else self.undo_pool.allocated_bytes
        copies = self.copier.allocated_bytes + self._stages.allocated_bytes
        return copies + undo_bytes + self.states.host_bytes

    def drain(self) -> None:
        """Give back all device buffers whose copies are in flight."""
        self._pending_copies.drain()

    def close(self) -> None:
        """End the threads."""
        self.queues.close()
        self.states.close()

    def release(self) -> None:
        """After `close`: free the buffers for copies."""
        self.drain()
        self.copier.release()
        self._stages.release()
        if self.undo_pool is not None:
            self.undo_pool.release()


__all__ = [
    "NUM_BUFFERS",
    "HostStore",
    "HostGradStore",
    "RotatingBuffers",
    "ParamCopier",
    "HostShard",
    "HostShardStore",
]
