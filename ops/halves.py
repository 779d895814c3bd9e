"""fp32 values in two halves of 16 bits: the upper one is bf16, and is used as it is; the lower one is the rest.

    bits of the value   | upper 16 | lower 16 |      high = (bits + 0x8000) >> 16     low = the lower 16 bits
                                                     bits = high << 16, plus `low` as a number with sign

`high` is the nearest bf16; a value in the middle of two goes to the one of larger magnitude. Half of these go
elsewhere where they are rounded to nearest even, about 8 of a million values. An even half would have 65,537
rests, too many for 16 bits. Every value comes back exactly, but all NaNs become one, and what rounds to 0
(below 4.6e-41) becomes that zero. So a zero that a script writes to `high` is one: `low` does not count
there. Beside an inf it counts only if both are the finite value that was rounded to inf.

Source: the remainders of `store_param_remainders` in TransformerEngine's FusedAdam. `narrow.h` and
`halves.cuh` have the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .flat import CHUNK_NUMEL
from .rounding import upper_half

_INF = 0x7F80
_MAGNITUDE = 0x7FFF
_DEVICE_NUMEL = 1 << 22  # of a part, so that temporary tensors stay small


class Halves(NamedTuple):
    """high: bf16 [n]. low: int16 [n]."""

    high: Tensor
    low: Tensor

    def part(self, start: int, stop: int) -> Halves:
        """Views of elements [start, stop)."""
        return Halves(self.high[start:stop], self.low[start:stop])

    def joined(self) -> Tensor:
        """The values, fp32 [n], in new memory."""
        values = torch.empty_like(self.high, dtype=torch.float32)
        bits = values.view(torch.int32)
        for piece in _pieces(values):
            high = self.high[piece].view(torch.int16).to(torch.int32)
            low, magnitude = self.low[piece].to(torch.int32), high & _MAGNITUDE
            counts = (magnitude > 0) & (magnitude < _INF + (low < 0).to(torch.int32))
            torch.add(high << 16, torch.where(counts, low, 0), out=bits[piece])
        return values

    def write(self, values: Tensor) -> None:
        """Become `values`, fp32 [n]."""
        write_upper(self.high, values)
        self.low.copy_(values.view(torch.int32).to(torch.int16))  # drops the upper bits


def write_upper(target: Tensor, values: Tensor) -> None:
    """target, bf16 [n], becomes the upper half of fp32 `values` [n]."""
    for piece in _pieces(values):
        target[piece].copy_(upper_half(values[piece]))


def _pieces(values: Tensor) -> Iterator[slice]:
    size = CHUNK_NUMEL if values.device.type == "cpu" else _DEVICE_NUMEL
    for start in range(0, values.numel(), size):
        yield slice(start, min(start + size, values.numel()))


__all__ = ["Halves", "write_upper"]
