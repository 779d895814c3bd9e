"""Collectives of ranks on one machine, which read each other's memory.

    all_gather       each rank copies the shards of the others into its flat buffer
    reduce_scatter   each rank adds its part of all flat buffers, in rank order, into `out`

A tensor that is not in shared memory is copied there first; one that is, is read where it is. Then `wait`
returns when all have read it. Bits and messages are those of pairwise.py. See docs/design/collectives.md.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from ..watch import Mark
from .collectives import CONTROL_BUFFER, Collectives, PartOf
from .handles import Handle
from .memory import operations
from .memory.meeting import Neighbours
from .memory.operations import KINDS, Line
from .pairwise import Messages, Pairwise

WHOLE_BYTES = 1 << 16  # up to it, every rank adds all elements instead of its part of them


@final
class SharedMemory(Pairwise):
    """Collectives of ranks that have mapped each other's memory."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        neighbours: Neighbours,
        timeout_seconds: float,
        part_of: PartOf | None = None,
        successor_of: Collectives | None = None,
    ) -> None:
        super().__init__(group, device, part_of, successor_of)
        self.neighbours = neighbours
        self._native = neighbours.segment.native
        self._line = Line(neighbours, self._watch, self._ranks, timeout_seconds)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        if device is not None and device.type != "cpu":
            return super().empty(numel, dtype, device)
        return self.neighbours.segment.empty(numel, dtype)

    def _transfer(
        self,
        mark: Mark,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        arguments = (tag, len(sends), _table(sends), len(receives), _table(receives))
        return self._line.start(mark, self._native.transfer, arguments, (receives, sends), finish)

    def _exchange(self, mark: Mark, tag: int, receives: Messages, sends: Messages) -> None:
        self._transfer(mark, tag, receives, sends).wait()

    def _all_gather(self, mark: Mark, flat: Tensor, shard: Tensor, tag: int, kind: str) -> Handle:
        self._count(kind, shard)
        own, size_bytes = flat.data_ptr(), shard.nbytes
        if own + self.rank * size_bytes != shard.data_ptr():
            self.shard_of(flat).copy_(shard)
        if not size_bytes:
            return operations.DONE
        arguments = (tag, shard.data_ptr(), own, size_bytes)
        return self._line.start(mark, self._native.all_gather, arguments, (flat, shard))

    def _reduce_scatter(self, mark: Mark, flat: Tensor, out: Tensor, add: bool, tag: int) -> Handle:
        if not operations.can_sum(flat.dtype, out.dtype):
            return super()._reduce_scatter(mark, flat, out, add, tag)
        return self._sum(mark, flat, out, self.rank * out.numel(), tag, add=add)

    def _sum(
        self,
        mark: Mark,
        flat: Tensor,
        out: Tensor,
        begins: int,
        tag: int,
        *,
        add: bool = False,
        copies: bool = False,
    ) -> Handle:
        """out [n] (+)= the sum over ranks of n elements of `flat`, from `begins` on."""
        part = (c_int64 * 3)(begins, out.numel(), out.data_ptr())
        kinds = KINDS[flat.dtype], KINDS[out.dtype]
        arguments = (tag, flat.data_ptr(), flat.numel(), *kinds, add, copies, 1, part)
        return self._line.start(mark, self._native.sum, arguments, (flat, out))

    def sums_whole(self, flat: Tensor) -> bool:
        return flat.nbytes <= WHOLE_BYTES or super().sums_whole(flat)

    def _sum_whole(self, mark: Mark, flat: Tensor, tag: int) -> Handle:
        if not operations.can_sum(flat.dtype, flat.dtype):
            return super()._sum_whole(mark, flat, tag)
        return self._sum(mark, flat, flat, 0, tag, copies=True)

    def sum(self, tensor: Tensor, *, what: str, kind: str) -> None:
        self.all_reduce(tensor, what=what, kind=kind).wait()

    def broadcast(
        self, tensor: Tensor, source: int = 0, what: str = "the first rank's values"
    ) -> None:
        mark = self._record("broadcast", "broadcast", CONTROL_BUFFER, what, tensor)
        is_source = self.rank == source
        if is_source:
            self._count("broadcast", tensor)
        sends = [(peer, tensor) for peer in self._peers if is_source and tensor.numel()]
        receives = [(source, tensor)] if not is_source and tensor.numel() else []
        self._transfer(mark, self._small_tag(CONTROL_BUFFER, tensor), receives, sends).wait()

    def barrier(self) -> None:
        mark = self._record("barrier", "barrier", CONTROL_BUFFER, "all ranks")
        own = torch.zeros(self.world_size, dtype=torch.uint8)
        arguments = (self._tag(CONTROL_BUFFER), own.data_ptr(), own.data_ptr(), 1)
        self._line.start(mark, self._native.all_gather, arguments, (own,)).wait()


def _table(messages: Messages) -> Any:
    """Peer, address and bytes of each."""
    flat = [value for peer, tensor in messages for value in (peer, tensor.data_ptr(), tensor.nbytes)]
    return (c_int64 * len(flat))(*flat)


__all__ = ["SharedMemory"]
