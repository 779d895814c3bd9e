"""The flat layout: literal tables, and properties over random shapes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from xds.zero.core.layout import Entry, FlatLayout, plan_flat


def test_slots_lie_group_by_group_on_64_byte_boundaries() -> None:
    entries = [
        Entry("a.weight", (3, 5), 0),
        Entry("a.bias", (3,), 1),
        Entry("b.weight", (4, 8), 0),
    ]
    layout = plan_flat(entries, world_size=2)
    assert [(slot.name, slot.offset, slot.numel) for slot in layout.slots] == [
        ("a.weight", 0, 15),
        ("b.weight", 16, 32),
        ("a.bias", 48, 3),
    ]
    assert [(s.group, s.start, s.stop) for s in layout.segments] == [(0, 0, 48), (1, 48, 64)]
    assert (layout.numel, layout.shard_numel, layout.padding_numel) == (64, 32, 14)
    assert layout.gaps() == [(15, 16), (51, 64)]
    assert layout.shard_range(1) == (32, 64)


def test_a_boundary_divides_a_slot_into_pieces() -> None:
    layout = plan_flat([Entry("w", (40,), 0), Entry("v", (8,), 0)], world_size=2)
    assert layout.numel == 64
    [left] = layout.pieces_in(0, 32)
    assert (left.slot.name, left.start, left.stop, left.slot_start, left.whole) == (
        "w",
        0,
        32,
        0,
        False,
    )
    right, whole = layout.pieces_in(32, 64)
    assert (right.start, right.stop, right.slot_start, right.whole) == (0, 8, 32, False)
    assert (whole.slot.name, whole.start, whole.stop, whole.whole) == ("v", 16, 24, True)


def test_segments_are_clipped_to_a_range() -> None:
    layout = plan_flat([Entry("w", (32,), 0), Entry("b", (32,), 3)], world_size=2)
    assert [(s.group, s.start, s.stop) for s in layout.segments_in(16, 48)] == [
        (0, 0, 16),
        (3, 16, 32),
    ]


shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
entry_lists = st.lists(st.tuples(shapes, st.integers(0, 3)), min_size=1, max_size=12)


def laid_out(raw: list[tuple[tuple[int, ...], int]], world_size: int) -> FlatLayout:
    return plan_flat([Entry(str(at), *entry) for at, entry in enumerate(raw)], world_size)


@settings(deadline=None)
@given(entry_lists, st.integers(1, 9))
def test_every_element_has_one_place(raw: list[tuple[tuple[int, ...], int]], world: int) -> None:
    layout = laid_out(raw, world)
    covered = [0] * layout.numel
    for slot in layout.slots:
        assert slot.offset % 16 == 0
        for at in range(slot.offset, slot.stop):
            covered[at] += 1
    for start, stop in layout.gaps():
        for at in range(start, stop):
            covered[at] += 1
    assert covered == [1] * layout.numel
    assert layout.numel % (16 * world) == 0
    assert layout.padding_numel < 16 * (len(layout.slots) + world)
    assert layout.segments[0].start == 0 and layout.segments[-1].stop == layout.numel


@settings(deadline=None)
@given(entry_lists, st.integers(1, 9))
def test_shards_rebuild_every_slot(raw: list[tuple[tuple[int, ...], int]], world: int) -> None:
    layout = laid_out(raw, world)
    rebuilt = {slot.name: [False] * slot.numel for slot in layout.slots}
    for rank in range(world):
        start, stop = layout.shard_range(rank)
        segments = layout.segments_in(start, stop)
        assert sum(s.stop - s.start for s in segments) == layout.shard_numel
        for piece in layout.pieces_in(start, stop):
            for at in range(piece.stop - piece.start):
                assert not rebuilt[piece.slot.name][piece.slot_start + at]
                rebuilt[piece.slot.name][piece.slot_start + at] = True
    assert all(all(values) for values in rebuilt.values())
