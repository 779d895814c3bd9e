"""Slices of tensors in checkpoints: which elements two slices share, by literals and against index tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xds.zero.checkpoint.ranges import Catalogue, Copy, Piece, Range, SavedFlat
from xds.zero.core.boxes import Runs, clipped, common_runs
from xds.zero.core.layout import Box, Slot

COLUMNS = Box((4, 6), 1, ((0, 3),))
ROWS = Box((4, 6), 0, ((1, 3),))


def test_the_shape_of_a_slice() -> None:
    packed = Box((8, 5), 0, ((0, 2), (4, 6)))
    assert (packed.length, packed.shape) == (4, (4, 5))
    assert Slot("w", (4, 5), 0, 0, packed).whole_shape == (8, 5)


@pytest.mark.parametrize(
    ("here", "there", "wanted"),
    [
        (None, None, [Runs(0, 0, 24)]),
        (COLUMNS, COLUMNS, [Runs(0, 0, 12)]),
        (ROWS, None, [Runs(0, 6, 12)]),
        (None, ROWS, [Runs(6, 0, 12)]),
        (COLUMNS, None, [Runs(0, 0, 3, 4, 3, 6)]),
        (None, COLUMNS, [Runs(0, 0, 3, 4, 6, 3)]),
        (COLUMNS, Box((4, 6), 1, ((2, 6),)), [Runs(2, 0, 1, 4, 3, 4)]),
        (COLUMNS, Box((4, 6), 1, ((3, 6),)), []),
        (COLUMNS, ROWS, [Runs(3, 0, 3, 2, 3, 6)]),
        (ROWS, COLUMNS, [Runs(0, 3, 3, 2, 6, 3)]),
    ],
)
def test_runs_that_two_slices_share(here: Box, there: Box, wanted: list[Runs]) -> None:
    assert common_runs(here, there, (4, 6)) == wanted


@pytest.mark.parametrize(
    ("start", "stop", "wanted"),
    [
        (0, 12, [Runs(0, 0, 3, 4, 3, 6)]),
        (2, 9, [Runs(2, 2, 1), Runs(3, 6, 3, 2, 3, 6)]),
        (1, 2, [Runs(1, 1, 1)]),
        (2, 7, [Runs(2, 2, 1), Runs(3, 6, 3), Runs(6, 12, 1)]),
        (12, 20, []),
    ],
)
def test_a_part_of_runs(start: int, stop: int, wanted: list[Runs]) -> None:
    assert clipped(Runs(0, 0, 3, 4, 3, 6), start, stop) == wanted


@st.composite
def boxes(draw: st.DrawFn, whole: tuple[int, ...]) -> Box | None:
    dim = draw(st.integers(-1, len(whole) - 1))
    if dim < 0:
        return None
    numbers = range(whole[dim] + 1)
    ends = draw(st.lists(st.sampled_from(numbers), min_size=2, max_size=6, unique=True))
    ends = sorted(ends)[: len(ends) // 2 * 2]
    return Box(whole, dim, tuple(zip(ends[::2], ends[1::2], strict=True)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Box | None, Box | None]:
    whole = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    return whole, draw(boxes(whole)), draw(boxes(whole))


def sliced(whole: torch.Tensor, box: Box | None) -> torch.Tensor:
    if box is None:
        return whole.flatten()
    parts = [whole.narrow(box.dim, start, stop - start) for start, stop in box.ranges]
    return torch.cat(parts, box.dim).flatten()


@given(pairs(), st.data())
def test_runs_are_the_common_elements(
    pair: tuple[tuple[int, ...], Box | None, Box | None], data: st.DataObject
) -> None:
    shape, here, there = pair
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    a, b = sliced(whole, here), sliced(whole, there)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(a))] * 2)))
    found = []
    for runs in common_runs(here, there, shape):
        for part in clipped(runs, start, stop):
            for k in range(part.count):
                at, to = part.here + k * part.here_step, part.there + k * part.there_step
                assert torch.equal(a[at : at + part.numel], b[to : to + part.numel])
                found += a[at : at + part.numel].tolist()
    assert len(found) == len(set(found))
    assert set(found) == set(a[start:stop].tolist()) & set(b.tolist())


def test_a_catalogue_joins_slices() -> None:
    """Two ranks have the columns of a matrix; a third wants its second row, and another the whole."""
    halves = [Box((2, 4), 1, ((2 * rank, 2 * rank + 2),)) for rank in range(2)]
    flats = [
        SavedFlat("param", True, "float32", 16, (Slot("w", (2, 2), 0, 4, box),)) for box in halves
    ]
    ranges = [Range(rank, "value", 0, 16, rank, f"v{rank}", "float32") for rank in range(2)]
    catalogue = Catalogue(flats, ranges)
    assert catalogue.uncovered() == []
    row = Piece("param", "w", 0, 4, 0, Box((2, 4), 0, ((1, 2),)))
    assert catalogue.copies(row, "value") == [
        Copy(0, "v0", "float32", source=6, target=0, numel=2),
        Copy(1, "v1", "float32", source=6, target=2, numel=2),
    ]
    assert catalogue.copies(Piece("param", "w", 0, 8, 0), "value") == [
        Copy(0, "v0", "float32", 4, 0, 2, 2, 2, 4),
        Copy(1, "v1", "float32", 4, 2, 2, 2, 2, 4),
    ]
    assert Catalogue(flats, ranges[:1]).uncovered() == ["w"]
    assert Catalogue(flats[:1], ranges[:1]).uncovered() == ["w"]
