"""Shards of parameters in the file of a rank: read when a unit is gathered, written after its update.

file ──> slot of the ring ──to_device──> the gathered buffer
update ──> slot of the ring ──> file
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ..host import ShardOnHost
from ..lanes import Lanes
from ..pinned import host_memory
from ..places import Blocks, Near, Shard, ShardHome, Ticket
from .in_file import InFile
from .options import DiskOptions
from .residence import OnDisk
from .transfers import Transfers, wait_quietly


@final
class ShardOnDisk(Shard):
    """A shard in one extent of the file."""

    is_on_host = True
    is_on_disk = True

    def __init__(
        self, transfers: Transfers, lanes: Lanes, residence: OnDisk, shard: Tensor
    ) -> None:
        self.tensor = shard
        self._transfers = transfers
        self._lanes = lanes
        self._residence = residence

    def bring(self) -> None:
        self._residence.bring()

    def fetch(self, target: Tensor, after: Ticket | None) -> Ticket:
        if self._residence.is_in_memory:
            values = self.tensor.detach()  # its memory stays, also when `tensor` reads as NaN
            return self._lanes.to_device.run(lambda: target.copy_(values))
        fetch = self._residence.fetch(after)

        def copy() -> None:
            slot = self._transfers.checking(fetch.wait)
            target.copy_(slot[: target.nbytes].view(target.dtype), non_blocking=True)
            self._transfers.ring.give(slot, _end_of_copy(target.device))

        return self._lanes.to_device.run(copy)

    def begin_receive(self) -> None:
        self._residence.discard()

    def receive(self, values: Tensor) -> None:
        if self._transfers.has_failed:
            return
        slot = self._transfers.ring.take()
        slot[: values.nbytes].view(values.dtype).copy_(values)
        written = self._residence.write(slot)
        self._transfers.ring.give(slot, partial(wait_quietly, written))

    def blocks(self) -> Blocks | None:
        return self._residence.blocks_of(self.tensor)


def _end_of_copy(device: torch.device) -> Callable[[], object] | None:
    """What returns when the copy that the lane has just started is done; None: it is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    synchronize: Callable[[], object] = event.synchronize
    return synchronize


@final
class ShardsOnDisk(InFile, ShardHome):
    """The file of this rank. The first `max_in_memory` elements stay in host memory."""

    is_on_host = True
    is_on_disk = True

    def __init__(
        self,
        lanes: Lanes,
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
        self._lanes = lanes
        self._left_in_memory = max_in_memory
        self._planned: set[int] = set()

    def plan(self, index: int, numel: int, itemsize: int) -> None:
        if numel <= self._left_in_memory:
            self._left_in_memory -= numel
            return
        self._planned.add(index)
        self._extents.add(str(index), numel * itemsize)

    def store(self, index: int, values: Tensor, near: Near) -> Shard:
        if index not in self._planned:
            memory = host_memory(values.nbytes, pin=self._pin)
            return ShardOnHost(memory.view(values.dtype).copy_(values), self._lanes)
        shard = values.to("cpu", copy=True)
        residence = self._residence(index, shard, holds_master=True)
        return ShardOnDisk(self._transfers, self._lanes, residence, shard)


__all__ = ["ShardOnDisk", "ShardsOnDisk"]
