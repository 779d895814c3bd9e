"""The backend of ranks on one machine, which read each other's memory.

    all_gather       each rank copies the shards of the others into its flat buffer
    reduce_scatter   each rank adds its part of all flat buffers, in rank order, into `out`

A tensor outside of shared memory is copied there first. A tensor inside is read where it is, and `wait`
returns when all have read it. Bits and messages are those of point_to_point.py. See
docs/design/collectives.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import torch
from torch import Tensor

from ..backend import ACTIVATION_BUFFER, CONTROL_BUFFER, Gather, Member, SharedFlat
from ..handles import DONE, Handle, Messages
from ..point_to_point import PointToPointBackend
from .operations import GroupOperations, InMemory, can_sum
from .peers import Neighbours
from .shared_files import open_shared

WHOLE_BYTES = 1 << 16  # up to it, every rank adds all elements instead of its part of them


class InMemoryBackend(PointToPointBackend):
    """Operations of a group of which all or some ranks share memory with this one."""

    def __init__(self, member: Member, neighbours: Neighbours, timeout_seconds: float) -> None:
        super().__init__(member)
        self.neighbours = neighbours
        self.memory = GroupOperations(neighbours, self.ranks, timeout_seconds)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return super().empty(numel, dtype, device)
        return self.neighbours.segment.empty(numel, dtype)

    def share(self, numel: int, dtype: torch.dtype, text: str, gather: Gather) -> SharedFlat | None:
        return open_shared(self.neighbours, self.rank, gather, numel, dtype, text)

    def publish_shared(self, flat: Tensor, buffer: int) -> Handle:
        return self._meet(self._tag(buffer))

    def wait_for_readers(self) -> None:
        self._meet(self._tag(CONTROL_BUFFER)).wait()

    def leave(self) -> None:
        self.memory.lost("this rank has left the group", None)

    def _meet(self, tag: int) -> InMemory:
        """Complete when each rank of this machine has started it. What they have written before is visible."""
        own = torch.zeros(self.world_size, dtype=torch.uint8)
        return self.memory.all_gather(tag, own, self.shard_of(own))


@final
class SharedMemoryBackend(InMemoryBackend):
    """Operations of ranks that have all mapped each other's memory."""

    def _transfer(
        self,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        return self.memory.transfer(tag, receives, sends, finish)

    def _all_gather(self, flat: Tensor, shard: Tensor, tag: int) -> Handle:
        size_bytes = shard.nbytes
        if flat.data_ptr() + self.rank * size_bytes != shard.data_ptr():
            self.shard_of(flat).copy_(shard)
        return self.memory.all_gather(tag, flat, shard) if size_bytes else DONE

    def reduce_scatter(self, flat: Tensor, out: Tensor, buffer: int, add: bool) -> Handle:
        if not can_sum(flat.dtype, out.dtype):
            return super().reduce_scatter(flat, out, buffer, add)
        parts = [(self.rank * out.numel(), out)]
        return self.memory.sum(self._tag(buffer) + 1, flat, parts, add=add)

    def _adds_whole(self, flat: Tensor) -> bool:
        return _is_small(flat) or super()._adds_whole(flat)

    def _is_small(self, flat: Tensor) -> bool:
        return _is_small(flat) or super()._is_small(flat)

    def _sum_whole(self, flat: Tensor, tag: int) -> Handle:
        if not can_sum(flat.dtype, flat.dtype):
            return super()._sum_whole(flat, tag)
        return self.memory.sum(tag, flat, [(0, flat)], copies=True)

    def _reduce_parts(self, flat: Tensor, tag: int) -> Handle:
        if not can_sum(flat.dtype, flat.dtype):
            return super()._reduce_parts(flat, tag)
        of = self._parts_of(flat)
        begins = sum(part.numel() for part in of[: self.rank])
        finish = partial(self._send_sums, of, tag)
        return self.memory.sum(tag, flat, [(begins, of[self.rank])], copies=True, finish=finish)

    def sum(self, tensor: Tensor) -> None:
        self.all_reduce(tensor, ACTIVATION_BUFFER).wait()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        is_source, whole = self.rank == source, tensor.contiguous()
        sends = [(peer, whole) for peer in self._peers if is_source and tensor.numel()]
        receives = [(source, whole)] if not is_source and tensor.numel() else []
        self._exchange(self._small_tag(CONTROL_BUFFER, whole), receives, sends)
        if whole is not tensor and not is_source:
            tensor.copy_(whole)

    def barrier(self) -> None:
        self._meet(self._tag(CONTROL_BUFFER)).wait()


def _is_small(flat: Tensor) -> bool:
    """Whether every rank adds all of it, by the native sum."""
    return flat.nbytes <= WHOLE_BYTES and can_sum(flat.dtype, flat.dtype)


__all__ = ["InMemoryBackend", "SharedMemoryBackend"]
