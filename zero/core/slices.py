"""Whole tensors of parameters of which every tensor rank has a slice: joined, and read in parts.

    rank 0  |a a . .|      rank 1  |. . b b|      joined  |a a b b|
            |a a . .|              |. . b b|              |a a b b|

Ranks with equal slices hold copies; the first of them sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor

from ...ops.comm.collectives import Collectives
from ...ops.flat import numel_of
from .boxes import clipped, common_runs
from .layout import Box

# (start, stop) -> elements [start, stop) of the flattened value
Reader = Callable[[int, int], Tensor]


def taken(whole: Tensor, box: Box) -> Tensor:
    """The slice of `whole`, as a new contiguous tensor."""
    parts = [whole.narrow(box.dim, start, stop - start) for start, stop in box.ranges]
    return torch.cat(parts, box.dim).contiguous()


def put(whole: Tensor, box: Box, values: Tensor) -> None:
    """Write a slice to its place in `whole`."""
    at = 0
    for start, stop in box.ranges:
        part = values.narrow(box.dim, at, stop - start)
        whole.narrow(box.dim, start, stop - start).copy_(part)
        at += stop - start


def reader_of_slice(reader: Reader, box: Box) -> Reader:
    """A reader of the elements of a slice; `reader` reads the whole tensor."""

    def read(start: int, stop: int) -> Tensor:
        found: Tensor | None = None
        for runs in common_runs(box, None, box.whole):
            for part in clipped(runs, start, stop):
                there = reader(part.there, part.there_stop)
                if found is None:
                    found = there.new_empty(stop - start)
                shape, at = (part.count, part.numel), part.here - start
                source = there.contiguous()
                source = source.as_strided(
                    shape, (part.there_step, 1), int(source.storage_offset())
                )
                found.as_strided(shape, (part.here_step, 1), at).copy_(source)
        return reader(0, 0) if found is None else found

    return read


@final
@dataclass(frozen=True, eq=False)
class Slices:
    """The slices of one parameter.

    tensor: the tensor ranks with this rank's data. together: all ranks that hold a slice of the parameter.
    boxes: by rank of `tensor`.
    is_first: this is a first data rank, whose slices are joined for a single rank.
    """

    tensor: Collectives
    together: Collectives
    boxes: tuple[Box, ...]
    is_first: bool

    @property
    def box(self) -> Box:
        """This rank's slice."""
        return self.boxes[self.tensor.rank]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.box.whole

    def join(self, part: Tensor | None, *, for_all: bool) -> Tensor | None:
        """The whole tensor, on all tensor ranks, or on the first; None elsewhere. `part`: this rank's slice.

        Sends: each slice to the ranks that get the whole. Unless `for_all`, only first data ranks take part.
        """
        if not (for_all or self.is_first):
            return None
        firsts = [self.boxes.index(box) == rank for rank, box in enumerate(self.boxes)]
        sizes = [
            numel_of(box.shape) if first else 0
            for box, first in zip(self.boxes, firsts, strict=True)
        ]
        bounds = list(pairwise([0, *accumulate(sizes)]))
        sends = firsts[self.tensor.rank] and part is not None
        device = self.tensor.device
        local = part.reshape(-1).to(device) if sends and part is not None else None
        wanted = for_all or self.tensor.rank == 0
        return self._collected(local, part, bounds, wanted=wanted, for_all=for_all)

    def _collected(
        self,
        local: Tensor | None,
        part: Tensor | None,
        bounds: list[tuple[int, int]],
        *,
        wanted: bool,
        for_all: bool,
    ) -> Tensor | None:
        assert part is not None or local is None
        dtype = torch.float32 if part is None else part.dtype
        mine = torch.empty(0, dtype=dtype, device=self.tensor.device) if local is None else local
        out = mine.new_empty(bounds[-1][1]) if wanted else None
        self.tensor.collect(out, mine, bounds, target=None if for_all else 0)
        if out is None:
            return None
        whole = out.new_empty(self.whole_shape)
        for box, (start, stop) in zip(self.boxes, bounds, strict=True):
            if start < stop:
                put(whole, box, out[start:stop].view(box.shape))
        return whole


__all__ = ["Reader", "Slices", "put", "reader_of_slice", "taken"]
