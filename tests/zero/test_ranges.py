"""The arithmetic of a checkpoint: tables to check by eye, and every layout against every other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xds.zero.checkpoint.ranges import (
    Catalogue,
    ConstantRange,
    Copy,
    Piece,
    Range,
    SavedFlat,
    merged,
    pieces,
    share,
)
from xds.zero.core.layout import Entry, Slot, plan_flat


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


def test_pieces_of_a_range() -> None:
    assert pieces(FLATS[0], 4, 20) == [
        Piece("param", "a", 4, 9, target=0),
        Piece("param", "b", 0, 4, target=12),
    ]


def test_copies_end_at_file_boundaries() -> None:
    found = Catalogue(FLATS, RANGES).copies(Piece("param", "b", 2, 12, target=5), "value")
    assert found == [
        Copy(1, "v1", "float32", source=10, target=5, numel=6),
        Copy(2, "v2", "float32", source=0, target=11, numel=4),
    ]


def test_missing_elements_are_left_out() -> None:
    catalogue = Catalogue(FLATS, RANGES[:1])
    assert catalogue.copies(Piece("param", "c", 0, 4, target=0), "value") == []
    assert catalogue.copies(Piece("param", "a", 0, 9, target=0), "grad") == []
    assert catalogue.copies(Piece("param", "a", 0, 9, target=0), "value") == [
        Copy(0, "v0", "float32", source=0, target=0, numel=8)
    ]
    assert catalogue.keys_of(Piece("param", "b", 0, 4, target=0)) == {}


def test_constants_hold_for_ranges() -> None:
    constants = [
        ConstantRange(0, "state/step", 0, 16, 3.0),
        ConstantRange(0, "state/step", 16, 32, 5.0),
    ]
    catalogue = Catalogue(FLATS, [], constants)
    assert catalogue.constants_of(Piece("param", "a", 3, 4, target=0)) == constants[:1]
    assert catalogue.constants_of(Piece("param", "b", 3, 4, target=0)) == constants[1:]


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


def test_states_of_whole_parameters_are_found_by_parameter() -> None:
    state = SavedFlat("state", False, "float32", 3, (Slot("x/y.weight/row", (3,), 0, 0),))
    catalogue = Catalogue([state], [])
    assert catalogue.states_of("x/y.weight") == ["x/y.weight/row"]
    assert catalogue.states_of("x") == []
    assert catalogue.compare([]).extra == ()


@given(st.integers(1, 9), st.integers(1, 1 << 20), st.integers(0, 20), st.sampled_from("ps"))
def test_shares_cover_everything_once(world_size: int, numel: int, turn: int, kind: str) -> None:
    flat = SavedFlat("param" if kind == "p" else "buffer", False, "float32", numel, ())
    cuts = [share(flat, rank, world_size, turn) for rank in range(world_size)]
    held = sorted((start, stop) for start, stop in cuts if start < stop)
    assert held[0][0] == 0 and held[-1][1] == numel
    assert all(before[1] == after[0] for before, after in zip(held, held[1:], strict=False))
    assert kind == "p" or cuts[0] == (0, numel)


SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=8)


@settings(deadline=None)
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
        Entry(name, shape, group) for name, shape, group in zip(values, shapes, groups, strict=True)
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
