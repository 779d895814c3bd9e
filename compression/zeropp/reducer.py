"""Reduces gradients in 4 bits, in two hops (qgZ): inside each host, then across hosts.

    rank = host * L + place, N = K * L ranks
    hop 1   to each rank of this host    its K parts of the gradients        sums of a host
    hop 2   to this place of each host   one part of the sums                sums of all hosts

Each hop sends 4 bits an element once, and adds in fp32. So each rank sends (K - 1) / N of the buffer to
other hosts. Where there is one host, or one rank on each, there is one hop.

Source: Wang et al., ZeRO++, 2023, section 3.3, https://arxiv.org/abs/2306.10209. Differs: any dtype, length and
stage from 1 to 3.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ...ops.comm.collectives import Collectives
from ...ops.comm.handles import Handle, Then
from ...ops.comm.mesh_groups import Levels
from ..gaps import gaps_in, zero_ranges
from ..scheme import Buffer, ExactReducer, GradientReducer, PendingError
from .errors import Errors
from .packets import QuantizedPackets

KIND = "int4 gradients"
SUM_KIND = "int4 sums of a host"
BITS = 4


@final
class QuantizedReducer(GradientReducer):
    """Sums in fp32 of gradients that are sent in 4 bits."""

    is_lossy = False  # nothing waits for a later message

    def __init__(self, levels: Levels, buffer: Buffer, errors: Errors, num_copies: int = 1) -> None:
        """num_copies: so many ranks compute the same gradient, which counts once."""
        self._whole = levels.whole
        self._buffer = buffer
        self._errors = errors
        self._num_copies = num_copies
        self._exact = ExactReducer(levels.whole, buffer.index)
        self._numel = buffer.numel // self._whole.world_size
        self._packets = QuantizedPackets(self._numel, BITS)
        self._own_gaps = gaps_in(buffer, self._whole.rank, self._whole.world_size)
        one_hop = 1 in (levels.inside.world_size, levels.across.world_size)
        self._first = levels.whole if one_hop else levels.inside
        self._second = None if one_hop else levels.across

    @torch.no_grad()
    def reduce(self, flat: Tensor, out: Tensor, *, add: bool) -> Handle:
        if self._num_copies > 1:
            flat.div_(self._num_copies)
        self._errors.begin(flat.device)
        length, count = self._first.world_size, self._num_hosts
        mine = self._packets.empty(length, count, device=flat.device)
        for place in range(0 if flat.is_meta else length):  # a plan has no values to pack
            for host in range(count):
                rank = host * length + place
                values = self._whole.shard_of(flat, rank)
                start = rank * self._numel
                self._errors.pack(self._packets, values, mine[place, host], start)
        theirs, handle = self._exchange(self._first, mine, KIND)
        shard = self._whole.shard_of(flat, 0)
        for _ in range(count):
            self._first.count_exact(KIND, shard)
        if self._second is not None:
            self._second.count_exact(SUM_KIND, shard)
        return Then(handle, lambda: self._receive(theirs, out, add=add), kept=mine)

    def _exchange(self, group: Collectives, mine: Tensor, kind: str) -> tuple[Tensor, Handle]:
        theirs = torch.empty_like(mine)
        if mine.is_meta:  # of a plan, whose parts are alike
            outs = parts = [mine[0]] * len(mine)
        else:
            outs, parts = list(theirs), list(mine)
        handle = group.all_to_all(
            outs,
            parts,
            what=f"flat buffer {self._buffer.index}",
            kind=kind,
            buffer=self._buffer.index,
        )
        return theirs, handle

    @torch.no_grad()
    def _receive(self, theirs: Tensor, out: Tensor, *, add: bool) -> None:
        if self._second is None:
            self._add_up(theirs[:, 0], out, add=add)
            return
        second, place = self._second, self._first.rank
        mine = self._packets.empty(second.world_size, device=out.device)
        partial = torch.empty(self._numel, dtype=torch.float32, device=out.device)
        for host in range(0 if out.is_meta else second.world_size):
            self._packets.unpack_sum(theirs[:, host], partial)
            start = (host * self._first.world_size + place) * self._numel
            self._errors.pack_again(self._packets, partial, mine[host], start)
        found, handle = self._exchange(second, mine, SUM_KIND)
        handle.wait()
        self._add_up(found, out, add=add)

    def _add_up(self, packets: Tensor, out: Tensor, *, add: bool) -> None:
        total = torch.empty_like(out) if add else out
        self._packets.unpack_sum(packets, total)
        # a block with nan is nan in gaps too, and `out` may be memory that later gradients come to
        zero_ranges(total, self._own_gaps)
        if add:
            out.add_(total)

    @property
    def _num_hosts(self) -> int:
        return 1 if self._second is None else self._second.world_size

    def cross_replicas(self, total: Tensor) -> Handle | None:
        return None

    def reduce_whole(self, flat: Tensor, out: Tensor) -> tuple[Handle, Handle] | None:
        return None

    def gather(self, total: Tensor, flat: Tensor) -> Handle:
        return self._exact.gather(total, flat)

    def keep(self, flat: Tensor) -> None:
        raise AssertionError("nothing waits for a later message")

    def undo(self) -> None:
        self._errors.undo()

    def end_step(self) -> None:
        self._errors.end_step()

    @property
    def has_pending_error(self) -> bool:
        return self._errors.are_kept

    @property
    def pending_error(self) -> PendingError | None:
        return self._errors.pending_error

    def restore(self, pending: PendingError | None) -> None:
        self._errors.restore(pending)

    @property
    def held_bytes(self) -> int:
        return self._errors.held_bytes


__all__ = ["QuantizedReducer"]
