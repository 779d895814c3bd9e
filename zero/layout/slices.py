"""Whole tensors of parameters of which ranks of a group have slices: joined, and read in parts.

    rank 0  |a a . .|      rank 1  |. . b b|      joined  |a a b b|
            |a a . .|              |. . b b|              |a a b b|

Ranks with equal slices hold copies; the first of them sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor

from ...ops.boxes import Box, Boxes, put
from ...ops.comm.collectives import Collectives
from ...ops.flat import numel_of, overlap


@dataclass(frozen=True)
class StridedRuns:
    """`count` runs of `numel` elements: run k begins at element here + k * here_step of one slice, and at
    there + k * there_step of the other.
    """

    here: int
    there: int
    numel: int
    count: int = 1
    here_step: int = 0
    there_step: int = 0

    @property
    def total_numel(self) -> int:
        return self.numel * self.count

    @property
    def there_stop(self) -> int:
        """The end of the last run."""
        return self.there + (self.count - 1) * self.there_step + self.numel

    def turned(self) -> StridedRuns:
        """The same with both sides exchanged."""
        return StridedRuns(
            self.there, self.here, self.numel, self.count, self.there_step, self.here_step
        )


def clipped(runs: StridedRuns, start: int, stop: int) -> list[StridedRuns]:
    """The part of `runs` whose elements `here` are in [start, stop), in order: at most three objects.

    >>> clipped(StridedRuns(0, 0, 3, 4, 3, 6), 2, 9)
    [StridedRuns(here=2, there=2, numel=1, count=1, here_step=0, there_step=0), \
StridedRuns(here=3, there=6, numel=3, count=2, here_step=3, there_step=6)]
    """
    if runs.count == 1:
        low, high = overlap((runs.here, runs.here + runs.numel), (start, stop))
        return [_part(runs, 0, low, high)] if low < high else []
    step = runs.here_step
    first = max(-((runs.here - start) // step), 0)  # the first and the last + 1 that are inside
    last = min((stop - runs.numel - runs.here) // step + 1, runs.count)
    if (first, last) == (0, runs.count):
        return [runs]
    found = []
    if 0 < first <= runs.count:
        found += _edge(runs, first - 1, start, stop)
    if first < last:
        inside = _part(runs, first, runs.here + first * step, runs.here + first * step + runs.numel)
        several = {"here_step": step, "there_step": runs.there_step} if last - first > 1 else {}
        found.append(replace(inside, count=last - first, **several))
    if first <= last < runs.count:
        found += _edge(runs, last, start, stop)
    return found


def _edge(runs: StridedRuns, k: int, start: int, stop: int) -> list[StridedRuns]:
    at = runs.here + k * runs.here_step
    low, high = overlap((at, at + runs.numel), (start, stop))
    return [_part(runs, k, low, high)] if low < high else []


def _part(runs: StridedRuns, k: int, low: int, high: int) -> StridedRuns:
    """Elements [low, high) `here`, which are in run `k`."""
    shift = low - runs.here - k * runs.here_step
    return StridedRuns(low, runs.there + k * runs.there_step + shift, high - low)


def common_runs(here: Box | None, there: Box | None, shape: Sequence[int]) -> list[StridedRuns]:
    """The elements of a tensor of shape `shape` that two slices have. None: the whole tensor."""
    if here == there:
        numel = numel_of(shape if here is None else here.shape)
        return [StridedRuns(0, 0, numel)] if numel else []
    if here is None or (there is not None and there.dim > here.dim):
        assert there is not None
        return [runs.turned() for runs in _runs(there, here, shape)]
    return list(_runs(here, there, shape))


def runs_to_channels_last(shape: Sequence[int]) -> list[StridedRuns]:
    """All elements of a tensor of `shape`: `here` in row-major order, `there` in that of channels_last."""
    channels, inner = shape[1], numel_of(shape[2:])
    return [
        StridedRuns(
            row * channels * inner + at, (row * inner + at) * channels, 1, channels, inner, 1
        )
        for row in range(shape[0])
        for at in range(inner)
    ]


def _runs(here: Box, there: Box | None, shape: Sequence[int]) -> Iterator[StridedRuns]:
    """`there` is whole, or cut in the same dimension or an earlier one."""
    dim, inner = here.dim, numel_of(shape[here.dim + 1 :])
    if there is None or there.dim == dim:
        full = ((0, shape[dim]),)
        steps = here.length * inner, (shape[dim] if there is None else there.length) * inner
        rows = numel_of(shape[:dim])
        for a, b, numel in _shared(here.ranges, full if there is None else there.ranges):
            yield _several(a * inner, b * inner, numel * inner, rows, *steps)
        return
    # `here` has all of the earlier dimension, and `there` all of the later one
    between = numel_of(shape[there.dim + 1 : dim])
    steps = here.length * inner, shape[dim] * inner
    for before in range(numel_of(shape[: there.dim])):
        for a, b, count in _shared(((0, shape[there.dim]),), there.ranges):
            row_here = (before * shape[there.dim] + a) * between
            row_there = (before * there.length + b) * between
            at = 0
            for start, stop in here.ranges:
                yield _several(
                    row_here * steps[0] + at * inner,
                    row_there * steps[1] + start * inner,
                    (stop - start) * inner,
                    count * between,
                    *steps,
                )
                at += stop - start


def _several(
    here: int, there: int, numel: int, count: int, here_step: int, there_step: int
) -> StridedRuns:
    """One run where there is one, or where the runs are adjacent on both sides."""
    if count == 1 or here_step == there_step == numel:
        return StridedRuns(here, there, numel * count)
    return StridedRuns(here, there, numel, count, here_step, there_step)


def _shared(
    one: Sequence[tuple[int, int]], two: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """(place in `one`, place in `two`, length) of what two lists of ranges share. Places count elements."""
    at_one = 0
    for start, stop in one:
        at_two = 0
        for low, high in two:
            first, last = overlap((start, stop), (low, high))
            if first < last:
                yield at_one + first - start, at_two + first - low, last - first
            at_two += high - low
        at_one += stop - start


# (start, stop) -> elements [start, stop) of the flattened value
Reader = Callable[[int, int], Tensor]


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

    group: ranks that each have one slice, such as the tensor ranks with this rank's data.
    together: all ranks that hold a slice of the parameter.
    boxes: by rank of `group`.
    is_first: `group` is the first one of its stage, whose slices are joined for a single rank.
    """

    group: Collectives
    together: Collectives
    boxes: Boxes
    is_first: bool

    @property
    def box(self) -> Box:
        """This rank's slice."""
        return self.boxes[self.group.rank]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.box.whole

    def join(self, part: Tensor | None, *, for_all: bool) -> Tensor | None:
        """The whole tensor, on all ranks of `group`, or on the first; None elsewhere.

        part: this rank's slice.
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
        sends = firsts[self.group.rank] and part is not None
        device = self.group.device
        local = part.reshape(-1).to(device) if sends and part is not None else None
        wanted = for_all or self.group.rank == 0
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
        mine = torch.empty(0, dtype=dtype, device=self.group.device) if local is None else local
        out = mine.new_empty(bounds[-1][1]) if wanted else None
        self.group.collect(out, mine, bounds, target=None if for_all else 0)
        if out is None:
            return None
        whole = out.new_empty(self.whole_shape)
        for box, (start, stop) in zip(self.boxes, bounds, strict=True):
            if start < stop:
                put(whole, box, out[start:stop].view(box.shape))
        return whole


__all__ = [
    "Reader",
    "StridedRuns",
    "Slices",
    "clipped",
    "common_runs",
    "reader_of_slice",
    "runs_to_channels_last",
]
