"""Gathers weights in the 8 bits in which their layers multiply: one scale a weight, the same on all ranks.

    shard --cast--> 1 byte an element --gather--> bytes of all ranks --cast back--> the buffer

Layers cast the gathered values again, with the bits of a cast of exact values. A weight has the largest
magnitude m, and the code q of an element is x 448 / m, rounded. The buffer gets (q / 448) m, rounded to its
dtype: m stays m, so the scale is the same, and others move by far less than half a step between two codes.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ...ops.comm.collectives import Collectives
from ...ops.comm.handles import Handle, Then
from ...ops.flat import overlap
from ...utils.errors import UsageError
from ..scheme import Buffer, CommScheme, GradientReducer, ParamSender, exchange_maxima

KIND = "float8 parameters"
LEAST = 1e-12  # the least magnitude that torchao takes as m


@final
class CastSender(ParamSender):
    """Gathers in 8 bits. The shards stay exact."""

    keeps_master = False
    sends_differences = False
    rounds = True
    held_bytes = 0

    def __init__(self, collectives: Collectives, buffer: Buffer, dtype: torch.dtype) -> None:
        """dtype: of 8 bits, in which the layers multiply."""
        self._collectives = collectives
        self._buffer = buffer
        self._dtype = dtype
        self._largest = torch.finfo(dtype).max
        self._maxima: Tensor | None = None  # [slots] fp32, by which the buffer was gathered last
        self._is_stale = True  # the shards have changed since
        length = buffer.numel // collectives.world_size
        self._ranges = [
            [
                (number, low - rank * length, high - rank * length)
                for number, slot in enumerate(buffer.slots)
                for low, high in [overlap(slot, (rank * length, (rank + 1) * length))]
                if low < high
            ]
            for rank in range(collectives.world_size)
        ]

    @property
    def num_maxima(self) -> int:
        return len(self._buffer.slots) if self._is_stale else 0

    def maxima(self, shard: Tensor) -> Tensor:
        found = torch.zeros(len(self._buffer.slots), dtype=torch.float32, device=shard.device)
        for number, start, stop in self._ranges[self._collectives.rank]:
            found[number] = shard[start:stop].abs().amax()
        return found

    def take_maxima(self, maxima: Tensor) -> None:
        self._maxima, self._is_stale = maxima.clamp(min=LEAST), False

    @torch.no_grad()
    def gather(self, flat: Tensor, shard: Tensor) -> Handle:
        if self._is_stale:
            exchange_maxima(self._collectives, [(self, shard)])
        own = self._codes(shard)
        codes = torch.empty(flat.numel(), dtype=torch.uint8, device=flat.device)
        self._collectives.count_exact(KIND, shard)
        handle = self._collectives.all_gather(codes, own, buffer=self._buffer.index, kind=KIND)

        def finish() -> None:
            for rank in range(self._collectives.world_size):
                part = self._collectives.shard_of(flat, rank)
                self._write(part, self._collectives.shard_of(codes, rank), rank)

        return Then(handle, finish, kept=own)

    def _codes(self, shard: Tensor) -> Tensor:
        """The bytes of this rank's `shard` [n]; of gaps, 0."""
        assert self._maxima is not None
        codes = torch.zeros(shard.numel(), dtype=torch.uint8, device=shard.device)
        # not `largest / maxima`, which torch computes as largest * (1 / maxima): rounded twice
        scales = torch.full_like(self._maxima, self._largest).div_(self._maxima)
        for number, start, stop in self._ranges[self._collectives.rank]:
            scaled = (shard[start:stop].float() * scales[number]).clamp_(
                -self._largest, self._largest
            )
            codes[start:stop].view(self._dtype).copy_(scaled)
        return codes

    def _write(self, out: Tensor, codes: Tensor, rank: int) -> None:
        """Write the values of the bytes of `rank` to `out` [n]; 0 to gaps."""
        assert self._maxima is not None
        out.zero_()
        for number, start, stop in self._ranges[rank]:
            values = codes[start:stop].view(self._dtype).float()
            out[start:stop].copy_(values.div_(self._largest).mul_(self._maxima[number]))

    def publish(self, flat: Tensor, values: Tensor) -> Handle:
        raise AssertionError("the values are gathered")

    @torch.no_grad()
    def take_written(self, flat: Tensor, shard: Tensor, start: int, stop: int) -> None:
        now = self._collectives.shard_of(flat)[start:stop].to(shard.device)
        kept = shard[start:stop]
        if self._maxima is None:  # it was never gathered in 8 bits
            kept.copy_(now)
            return
        rounded = torch.empty_like(shard)
        self._write(rounded, self._codes(shard), self._collectives.rank)
        before = rounded[start:stop]
        is_written = (now != before) & ~(now.isnan() & before.isnan())
        kept.copy_(torch.where(is_written, now, kept))
        # a device would wait for the answer; there values are cut off until the next update
        if self._is_stale or shard.device.type != "cpu":
            return
        if (self.maxima(shard) > self._maxima).any():
            raise UsageError(
                "a weight of a layer that multiplies in 8 bits was written while it was gathered (stage 3), "
                "and is larger than what ranks have agreed on; write inside xds.zero.GatheredParameters"
            )

    def keep(self, flat: Tensor) -> None:
        return

    def forget(self) -> None:
        self._is_stale = True


@final
class CastScheme(CommScheme):
    """Buffers whose layers cast them are gathered in the dtype of the cast, all else as `inner` sends it."""

    def __init__(self, inner: CommScheme, collectives: Collectives) -> None:
        """collectives: of the ranks that gather."""
        self._inner = inner
        self._collectives = collectives

    def reducer(self, buffer: Buffer) -> GradientReducer:
        return self._inner.reducer(buffer)

    def sender(self, buffer: Buffer) -> ParamSender:
        is_alone = self._collectives.world_size == 1
        if buffer.cast is None or is_alone or not buffer.is_gathered:
            return self._inner.sender(buffer)
        return CastSender(self._collectives, buffer, buffer.cast)


__all__ = ["CastScheme", "CastSender"]
