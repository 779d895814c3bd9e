"""The arithmetic of a checkpoint: tables to check by eye, every layout and every slice against every other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xds.ops.boxes import Box
from xds.zero.checkpoint.ranges import (
    Catalogue,
    Copy,
    Range,
    SavedFlat,
    TargetPiece,
    merged,
    pieces,
    share,
)
from xds.zero.layout.layout import ParamEntry, Slot, plan_flat
from xds.zero.layout.slices import clipped, common_runs


def flat_of(*slots: tuple[str, int, int], numel: int = 32) -> SavedFlat:
    """Slots are (name, offset, numel)."""
    made = tuple(Slot(name, (count,), 0, offset) for name, offset, count in slots)
    return SavedFlat("param", True, "float32", numel, made)


FLATS = [flat_of(("a", 0, 9), ("b", 16, 12))]
RANGES = [
    Range(0, "value", 0, 8, file=0, tensor="v0", dtype="float32"),
    Range(0, "value", 8, 24, file=1, tensor="v1", dtype="float32"),
    Range(0, "value", 24, 32, file=2, tensor="v2", dtype="float32"),
]


def test_copies_end_at_file_boundaries() -> None:
    found = Catalogue(FLATS, RANGES).copies(TargetPiece("param", "b", 2, 12, target=5), "value")
    assert found == [
        Copy(1, "v1", "float32", source=10, target=5, numel=6),
        Copy(2, "v2", "float32", source=0, target=11, numel=4),
    ]


def test_overlapping_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="claim element 8"):
        Catalogue(FLATS, [RANGES[1], Range(0, "value", 0, 9, 0, "v0", "float32")])


def test_neighbours_are_read_at_once() -> None:
    one, two = Copy(1, "v", "float32", 4, 0, 6), Copy(1, "v", "float32", 10, 6, 2)
    apart, other = Copy(1, "v", "float32", 13, 8, 1), Copy(2, "v", "float32", 14, 9, 1)
    assert merged([one, two, apart, other]) == [
        Copy(1, "v", "float32", 4, 0, 8),
        apart,
        other,
    ]


def test_differences_are_named() -> None:
    found = Catalogue(FLATS, RANGES).compare([flat_of(("a", 0, 8), ("c", 8, 4))])
    assert (found.missing, found.extra) == (("c",), ("b",))
    assert found.shapes == ("a is [9] in the checkpoint and [8] in the model",)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 1 << 20), st.integers(0, 20), st.sampled_from("ps"))
def test_shares_cover_everything_once(world_size: int, numel: int, turn: int, kind: str) -> None:
    flat = SavedFlat("param" if kind == "p" else "buffer", False, "float32", numel, ())
    cuts = [share(flat, rank, world_size, turn) for rank in range(world_size)]
    held = sorted((start, stop) for start, stop in cuts if start < stop)
    assert held[0][0] == 0 and held[-1][1] == numel
    assert all(before[1] == after[0] for before, after in zip(held, held[1:], strict=False))
    assert kind == "p" or cuts[0] == (0, numel)


SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=8)


@settings(max_examples=60)
@given(SHAPES, st.data())
def test_every_layout_finds_its_elements_in_every_other(
    shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    old_world, new_world = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(shapes), max_size=len(shapes)))
    values = {
        f"p{at}": torch.arange(torch.Size(shape).numel()) + 1000 * (at + 1)
        for at, shape in enumerate(shapes)
    }
    entries = [
        ParamEntry(name, shape, group)
        for name, shape, group in zip(values, shapes, groups, strict=True)
    ]
    cut_at = data.draw(st.integers(0, len(entries)))
    flats, files = [], {}
    ranges = []
    for part in (entries[:cut_at], entries[cut_at:]):
        if part:
            layout = plan_flat(part, old_world)
            number = len(flats)
            flats.append(SavedFlat("param", True, "int64", layout.numel, layout.slots))
            full = torch.zeros(layout.numel, dtype=torch.int64)
            for slot in layout.slots:
                full[slot.offset : slot.stop] = values[slot.name]
            for rank in range(old_world):
                start, stop = layout.shard_range(rank)
                files[rank, f"v{number}"] = full[start:stop]
                ranges.append(Range(number, "value", start, stop, rank, f"v{number}", "int64"))
    catalogue = Catalogue(flats, data.draw(st.permutations(ranges)))
    wanted = plan_flat(data.draw(st.permutations(entries)), new_world)
    flat = SavedFlat("param", True, "int64", wanted.numel, wanted.slots)
    read = 0
    for rank in range(new_world):
        start, stop = wanted.shard_range(rank)
        got = torch.zeros(stop - start, dtype=torch.int64)
        copies = merged(
            [c for p in pieces(flat, start, stop) for c in catalogue.copies(p, "value")]
        )
        for copy in copies:
            source = files[copy.file, copy.tensor][copy.source : copy.source + copy.numel]
            got[copy.target : copy.target + copy.numel] = source
            read += copy.numel
        for piece in pieces(flat, start, stop):
            expected = values[piece.name][piece.start : piece.stop]
            assert torch.equal(got[piece.target : piece.target + len(expected)], expected)
    assert read == sum(
        len(one) for one in values.values()
    )  # no layout reads elements that it does not need


def test_a_catalogue_joins_slices() -> None:
    """Two ranks have the columns of a matrix; a third wants its second row, and another the whole."""
    halves = [Box((2, 4), 1, ((2 * rank, 2 * rank + 2),)) for rank in range(2)]
    flats = [
        SavedFlat("param", True, "float32", 16, (Slot("w", (2, 2), 0, 4, box),)) for box in halves
    ]
    ranges = [Range(rank, "value", 0, 16, rank, f"v{rank}", "float32") for rank in range(2)]
    catalogue = Catalogue(flats, ranges)
    assert catalogue.uncovered() == []
    row = TargetPiece("param", "w", 0, 4, 0, Box((2, 4), 0, ((1, 2),)))
    assert catalogue.copies(row, "value") == [
        Copy(0, "v0", "float32", source=6, target=0, numel=2),
        Copy(1, "v1", "float32", source=6, target=2, numel=2),
    ]
    assert catalogue.copies(TargetPiece("param", "w", 0, 8, 0), "value") == [
        Copy(0, "v0", "float32", 4, 0, 2, 2, 2, 4),
        Copy(1, "v1", "float32", 4, 2, 2, 2, 2, 4),
    ]
    assert Catalogue(flats, ranges[:1]).uncovered() == ["w"]
    assert Catalogue(flats[:1], ranges[:1]).uncovered() == ["w"]


# -- slices -------------------------------------------------------------------------------------------------


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


ENDS = st.tuples(st.floats(0, 1), st.floats(0, 1))
APART = (2, 3, 4), Box((2, 3, 4), 0, ((1, 2),)), Box((2, 3, 4), 2, ((1, 3),))


@settings(max_examples=60)
@given(pairs(), ENDS)
@example(APART, (0.0, 1.0))
def test_runs_are_the_common_elements(
    pair: tuple[tuple[int, ...], Box | None, Box | None], ends: tuple[float, float]
) -> None:
    shape, here, there = pair
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    a, b = sliced(whole, here), sliced(whole, there)
    start, stop = sorted(int(end * len(a)) for end in ends)
    found = []
    for runs in common_runs(here, there, shape):
        for part in clipped(runs, start, stop):
            for k in range(part.count):
                at, to = part.here + k * part.here_step, part.there + k * part.there_step
                assert torch.equal(a[at : at + part.numel], b[to : to + part.numel])
                found += a[at : at + part.numel].tolist()
    assert len(found) == len(set(found))
    assert set(found) == set(a[start:stop].tolist()) & set(b.tolist())
