"""Collectives of ranks on one machine, which read each other's memory.

    all_gather       each rank copies the shards of the others into its flat buffer
    reduce_scatter   each rank adds its part of all flat buffers, in rank order, into `out`

A tensor that is not in shared memory is copied there first; one that is, is read where it is. Then `wait`
returns when all have read it. Bits and messages are those of pairwise.py. See docs/design/collectives.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

from torch import Tensor

from ..watch import Mark
from .collectives import CONTROL_BUFFER
from .handles import Handle
from .memory import operations
from .memory.operations import Messages
from .pairwise_in_memory import PairwiseInMemory

WHOLE_BYTES = 1 << 16  # up to it, every rank adds all elements instead of its part of them


@final
class SharedMemory(PairwiseInMemory):
    """Collectives of ranks that have mapped each other's memory."""

    def _transfer(
        self,
        mark: Mark,
        tag: int,
        receives: Messages,
        sends: Messages,
        finish: Callable[[], None] | None = None,
    ) -> Handle:
        return self._memory.transfer(mark, tag, receives, sends, finish)

    def _all_gather(self, mark: Mark, flat: Tensor, shard: Tensor, tag: int, kind: str) -> Handle:
        self._count(kind, shard)
        own, size_bytes = flat.data_ptr(), shard.nbytes
        if own + self.rank * size_bytes != shard.data_ptr():
            self.shard_of(flat).copy_(shard)
        if not size_bytes:
            return operations.DONE
        return self._memory.all_gather(mark, tag, flat, shard)

    def _reduce_scatter(
        self, mark: Mark, flat: Tensor, out: Tensor, add: bool, tag: int, kind: str
    ) -> Handle:
        if not operations.can_sum(flat.dtype, out.dtype):
            return super()._reduce_scatter(mark, flat, out, add, tag, kind)
        self._count(kind, self.shard_of(flat))
        return self._memory.sum(mark, tag, flat, [(self.rank * out.numel(), out)], add=add)

    def _adds_whole(self, flat: Tensor) -> bool:
        return _is_small(flat) or super()._adds_whole(flat)

    def _is_small(self, flat: Tensor) -> bool:
        return _is_small(flat) or super()._is_small(flat)

    def _sum_whole(self, mark: Mark, flat: Tensor, tag: int) -> Handle:
        if not operations.can_sum(flat.dtype, flat.dtype):
            return super()._sum_whole(mark, flat, tag)
        return self._memory.sum(mark, tag, flat, [(0, flat)], copies=True)

    def _reduce_parts(self, mark: Mark, flat: Tensor, tag: int) -> Handle:
        if not operations.can_sum(flat.dtype, flat.dtype):
            return super()._reduce_parts(mark, flat, tag)
        of = self._parts_of(flat)
        begins = sum(part.numel() for part in of[: self.rank])
        finish = partial(self._send_sums, mark, tag, of)
        parts = [(begins, of[self.rank])]
        return self._memory.sum(mark, tag, flat, parts, copies=True, finish=finish)

    def sum(self, tensor: Tensor, *, what: str, kind: str) -> None:
        self.all_reduce(tensor, what=what, kind=kind).wait()

    def broadcast(
        self, tensor: Tensor, source: int = 0, what: str = "the first rank's values"
    ) -> None:
        mark = self._record("broadcast", "broadcast", CONTROL_BUFFER, what, tensor)
        is_source = self.rank == source
        self._count("broadcast", tensor if is_source else tensor.new_empty(0))
        whole = tensor.contiguous()
        sends = [(peer, whole) for peer in self._peers if is_source and tensor.numel()]
        receives = [(source, whole)] if not is_source and tensor.numel() else []
        self._exchange(mark, self._small_tag(CONTROL_BUFFER, whole), receives, sends)
        if whole is not tensor and not is_source:
            tensor.copy_(whole)

    def barrier(self) -> None:
        mark = self._record("barrier", "barrier", CONTROL_BUFFER, "all ranks")
        self._meet(mark, self._tag(CONTROL_BUFFER)).wait()


def _is_small(flat: Tensor) -> bool:
    """Every rank adds it all, by the native sum."""
    return flat.nbytes <= WHOLE_BYTES and operations.can_sum(flat.dtype, flat.dtype)


__all__ = ["SharedMemory"]
