"""MiCS (Zhang et al., 2022, arXiv:2205.00119): sums inside a shard group, then over its replicas.

    ranks 0 1 | 2 3      inside  0 1 / 2 3   a shard group: reduces and gathers, as a group without replicas
                         across  0 2 / 1 3   the ranks with one shard: replicas of it

The hop across is made once in a step (section 3.3), whatever the number of micro-batches. A sum that has
crossed is complete: later gradients are summed separately, and cross alone. Unlike in the paper the hop has the
dtype of the sums, fp32 for 16-bit parameters, so no bits are lost between the two sums.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ..ops.comm.collectives import Collectives
from ..ops.comm.handles import Handle, Then
from ..ops.comm.mesh_groups import Levels
from .scheme import Buffer, CommScheme, GradientReducer, ParamSender, PendingError

ACROSS = "all_reduce"  # the kind of its messages
WHAT = "gradients over replicas"


@final
class ReplicatedReducer(GradientReducer):
    """Reduces with `inner` over a shard group, then over its replicas: the same bits on each of them.

    Sends, beside `inner`, 2 (R - 1) / R of the bytes of a shard, for R replicas.
    """

    def __init__(self, inner: GradientReducer, across: Collectives, buffer: int) -> None:
        """across: the ranks that have this rank's shard. buffer: the number of the flat buffer."""
        self._inner = inner
        self._across = across
        self._buffer = buffer
        self._is_complete = True  # the total is the sum over all replicas, or there is none
        self._rest: Tensor | None = None  # sums over the shard group since the total crossed

    @property
    def is_lossy(self) -> bool:
        return self._inner.is_lossy

    def reduce(self, flat: Tensor, out: Tensor, *, add: bool) -> Handle:
        if not (add and self._is_complete):
            self._is_complete = False
            return self._inner.reduce(flat, out, add=add)
        has_rest = self._rest is not None
        if self._rest is None:
            self._rest = torch.empty_like(out)
        return self._inner.reduce(flat, self._rest, add=has_rest)

    def cross_replicas(self, total: Tensor) -> Handle | None:
        if self._rest is not None:
            rest, self._rest = self._rest, None

            def add() -> None:
                total.add_(rest)

            return Then(self._cross(rest), add)
        if self._is_complete:
            return None
        self._is_complete = True
        return self._cross(total)

    def _cross(self, sums: Tensor) -> Handle:
        return self._across.all_reduce(sums, what=WHAT, kind=ACROSS, buffer=self._buffer)

    def reduce_whole(self, flat: Tensor, out: Tensor) -> tuple[Handle, Handle] | None:
        return None

    def gather(self, total: Tensor, flat: Tensor) -> Handle:
        raise AssertionError("with replicas some state is sharded, so no rank needs all sums")

    def keep(self, flat: Tensor) -> None:
        self._inner.keep(flat)

    def undo(self) -> None:
        self._inner.undo()

    def end_step(self) -> None:
        self._is_complete, self._rest = True, None
        self._inner.end_step()

    @property
    def has_pending_error(self) -> bool:
        return self._inner.has_pending_error

    @property
    def pending_error(self) -> PendingError | None:
        return self._inner.pending_error

    def restore(self, pending: PendingError | None) -> None:
        self._inner.restore(pending)

    @property
    def held_bytes(self) -> int:
        return self._inner.held_bytes


@final
class ReplicatedScheme(CommScheme):
    """Gradients are summed over replicas as well; parameters are sent inside the shard group."""

    def __init__(self, inner: CommScheme, levels: Levels) -> None:
        """inner: the scheme of the shard group `levels.inside`."""
        self._inner = inner
        self._levels = levels

    def reducer(self, buffer: Buffer) -> GradientReducer:
        return ReplicatedReducer(self._inner.reducer(buffer), self._levels.across, buffer.index)

    def sender(self, buffer: Buffer) -> ParamSender:
        return self._inner.sender(buffer)


__all__ = ["ACROSS", "ReplicatedScheme", "ReplicatedReducer"]
