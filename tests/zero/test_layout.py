"""Where parameters lie: the units of a model, and the slots, gaps and shards of a flat buffer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TinyModel
from torch import nn

from xds.utils.errors import UsageError
from xds.zero.layout.discover import find_units
from xds.zero.layout.layout import ParamEntry, plan_flat


def names(model: nn.Module, **options: object) -> list[str]:
    return [unit.name for unit in find_units(model, **options)[0]]  # type: ignore[arg-type]


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])


def test_units_are_children_of_lists_and_the_rest_is_the_root() -> None:
    units, root = find_units(TinyModel("unused"))
    assert [unit.name for unit in units] == ["blocks.0", "blocks.1", "blocks.2"]
    inside = ("embed.weight", "norm.weight", "norm.bias", "head.weight", "head.bias")
    spare = ("spare.weight", "spare.bias")  # without `empty`, which has no elements
    assert [name for name, _ in root.params] == [*inside, *spare]
    assert root.modules[0].__class__ is TinyModel
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    assert names(nn.Sequential(nn.Embedding(5, 4), layers)) == ["1.0", "1.1", "1.2"]
    assert names(nn.ModuleList([Moe(), Moe()])) == ["0", "1"]  # experts do not split a block
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)])  # 12 elements each
    units, _ = find_units(model, min_numel=24)
    assert [unit.name for unit in units] == ["0..1", "2..3", "4"]
    assert [len(unit.modules) for unit in units] == [2, 2, 1]
    sizes = (3, 9, 3, 3, 3)  # a large block stays alone, and ends the run of small ones
    assert names(nn.Sequential(*[nn.Linear(size, 3) for size in sizes]), min_numel=24) == [
        *("0", "1", "2..3", "4")
    ]


def test_units_can_be_named_and_tied_parameters_go_to_the_root() -> None:
    assert names(TinyModel(), named=["Linear"])[:2] == ["blocks.0.up", "blocks.0.down"]
    assert names(TinyModel(), named=["blocks.*"]) == ["blocks.0", "blocks.1", "blocks.2"]
    with pytest.raises(UsageError, match=r"zero_optimization.units = \['Blok'\]: no module"):
        find_units(TinyModel(), named=["Blok"])
    units, root = find_units(TinyModel("tied_blocks"))
    assert "blocks.0.up.weight" in [name for name, _ in root.params]
    assert all("up.weight" not in name for unit in units[::2] for name, _ in unit.params)
    _, root = find_units(TinyModel("tied"))
    assert [name for name, _ in root.params].count("embed.weight") == 1


def test_slots_lie_group_by_group_on_64_byte_boundaries() -> None:
    entries = [
        ParamEntry("a.weight", (3, 5), 0),
        ParamEntry("a.bias", (3,), 1),
        ParamEntry("b.weight", (4, 8), 0),
    ]
    layout = plan_flat(entries, world_size=2)
    assert [(slot.name, slot.offset, slot.numel) for slot in layout.slots] == [
        ("a.weight", 0, 15),
        ("b.weight", 16, 32),
        ("a.bias", 48, 3),
    ]
    assert [(s.group, s.start, s.stop) for s in layout.segments] == [(0, 0, 48), (1, 48, 64)]
    assert [(s.group, s.start, s.stop) for s in layout.segments_in(16, 56)] == [
        (0, 0, 32),
        (1, 32, 40),
    ]
    assert (layout.numel, layout.shard_numel, layout.payload_numel) == (64, 32, 50)
    assert layout.gaps() == [(15, 16), (51, 64)]
    assert layout.shard_range(1) == (32, 64)
    last, whole = layout.pieces_in(32, 64)  # a boundary of shards divides b.weight
    assert (last.slot.name, last.start, last.stop, last.slot_start) == ("b.weight", 0, 16, 16)
    assert (whole.slot.name, whole.start, whole.stop) == ("a.bias", 16, 19)


shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
entry_lists = st.lists(st.tuples(shapes, st.integers(0, 3)), min_size=1, max_size=12)


@settings(max_examples=50)
@given(entry_lists, st.integers(1, 9))
def test_every_element_has_one_place_and_shards_rebuild_every_slot(
    raw: list[tuple[tuple[int, ...], int]], world_size: int
) -> None:
    layout = plan_flat([ParamEntry(str(at), *entry) for at, entry in enumerate(raw)], world_size)
    covered = [0] * layout.numel
    for start, stop in [*((slot.offset, slot.stop) for slot in layout.slots), *layout.gaps()]:
        for at in range(start, stop):
            covered[at] += 1
    assert covered == [1] * layout.numel
    assert all(slot.offset % 16 == 0 for slot in layout.slots)
    assert layout.numel % (16 * world_size) == 0
    assert layout.numel - layout.payload_numel < 16 * (len(layout.slots) + world_size)
    assert layout.segments[0].start == 0 and layout.segments[-1].stop == layout.numel
    rebuilt = {slot.name: [0] * slot.numel for slot in layout.slots}
    for rank in range(world_size):
        start, stop = layout.shard_range(rank)
        assert sum(s.stop - s.start for s in layout.segments_in(start, stop)) == layout.shard_numel
        for piece in layout.pieces_in(start, stop):
            for at in range(piece.stop - piece.start):
                rebuilt[piece.slot.name][piece.slot_start + at] += 1
    assert all(set(found) <= {1} for found in rebuilt.values())
