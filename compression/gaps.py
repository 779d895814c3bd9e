"""The gaps of a flat buffer: elements of no parameter, which must stay 0.

A block of a message has one magnitude for all of its elements. So what arrives may differ from 0 in gaps too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..ops.flat import overlap
from .scheme import Buffer


def gaps_in(buffer: Buffer, rank: int, world_size: int) -> list[tuple[int, int]]:
    """[start, stop) of the gaps in the part of `rank`, relative to it."""
    numel = buffer.numel // world_size
    first = rank * numel
    found = [overlap(gap, (first, first + numel)) for gap in buffer.gaps]
    return [(start - first, stop - first) for start, stop in found if start < stop]


def zero_ranges(flat: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    """Set the elements [start, stop) of each range to 0."""
    for start, stop in ranges:
        flat[start:stop].zero_()


__all__ = ["gaps_in", "zero_ranges"]
