"""Shards of parameters in the file of a rank: read when a unit is gathered, written after its update.

file ──> slot of the pool ──to_device──> the gathered buffer
update ──> slot of the pool ──> file
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ...ops.device import device_of
from ..host import HostShard
from ..interfaces import Blocks, JobHandle, Shard, ShardStore, ToDevice
from ..job_queues import JobQueues
from ..pinned import host_memory
from .file_store import FileStore
from .options import DiskOptions, aligned
from .storage import DiskStorage
from .transfers import Transfers, wait_quietly


@final
class DiskShard(Shard):
    """A shard in one extent of the file."""

    is_on_host = True
    is_on_disk = True

    def __init__(
        self, transfers: Transfers, queues: JobQueues, storage: DiskStorage, shard: Tensor
    ) -> None:
        super().__init__(shard)
        self._transfers = transfers
        self._queues = queues
        self._storage = storage

    def load(self) -> None:
        self._storage.load()

    def fetch(self, target: Tensor, after: JobHandle | None) -> JobHandle:
        if self._storage.is_in_memory:
            values = self.tensor.detach()  # its memory stays, also when `tensor` reads as NaN
            return self._queues.to_device.run(lambda: target.copy_(values))
        fetch = self._storage.fetch(after)

        def copy() -> None:
            slot = self._transfers.noting_failure(fetch.wait)
            target.copy_(slot[: target.nbytes].view(target.dtype), non_blocking=True)
            self._transfers.slots.give(slot, _end_of_copy(target.device))

        return self._queues.to_device.run(copy)

    def discard(self) -> None:
        self._storage.discard()

    def write(self, values: Tensor) -> None:
        if self._transfers.has_failed:
            return
        slot = self._transfers.slots.take()
        slot[: values.nbytes].view(values.dtype).copy_(values)
        written = self._storage.write(slot)
        self._transfers.slots.give(slot, partial(wait_quietly, written))

    def blocks(self) -> Blocks | None:
        return self._storage.blocks_of(self.tensor)


def _end_of_copy(device: torch.device) -> Callable[[], object] | None:
    """What returns when the copy that the queue has just started is done; None: it is done."""
    if not device_of(device).runs_ahead:
        return None
    synchronize: Callable[[], object] = device_of(device).event().synchronize
    return synchronize


@final
class DiskShardStore(FileStore, ShardStore):
    """The file of this rank. The first `max_in_memory` elements stay in host memory."""

    is_on_host = True
    is_on_disk = True

    def __init__(
        self,
        queues: JobQueues,
        folder: Path,
        options: DiskOptions,
        rank: int,
        *,
        max_in_memory: int,
        pin: bool,
    ) -> None:
        """
        Args:
            folder: `offload_param.nvme_path`.
            max_in_memory: `offload_param.max_in_cpu`, elements of this rank.
        """
        super().__init__(folder, options, rank, pin=pin)
        self._queues = queues
        self._left_in_memory = max_in_memory
        self._planned: set[int] = set()

    def plan(self, index: int, numel: int, itemsize: int) -> None:
        if numel <= self._left_in_memory:
            self._left_in_memory -= numel
            return
        self._planned.add(index)
        self._plan(index, aligned(numel * itemsize), 1)

    def add(self, index: int, values: Tensor, to_device: ToDevice) -> Shard:
        if index not in self._planned:
            memory = host_memory(values.nbytes, pin=self._pin)
            return HostShard(memory.view(values.dtype).copy_(values), self._queues)
        shard = values.to("cpu", copy=True)
        storage = self._state_storage(index, shard, holds_master=True)
        return DiskShard(self._transfers, self._queues, storage, shard)

    def coded(self, values: Tensor, exact: Sequence[tuple[int, int]]) -> Shard:
        from ..coded import CodedShard

        return CodedShard(values, exact, self._queues.to_device, pin=self._pin)


__all__ = ["DiskShard", "DiskShardStore"]
