"""Units of a model: found from the module tree or by name, merged, tied."""

from __future__ import annotations

import pytest
from models import TinyModel
from torch import nn

from xds.utils.errors import UsageError
from xds.zero.core.discover import find_units


def names(units: object) -> list[str]:
    return [unit.name for unit in units]  # type: ignore[attr-defined]


def test_children_of_a_module_list_are_units_and_the_rest_is_the_root() -> None:
    units, root = find_units(TinyModel())
    assert names(units) == ["blocks.0", "blocks.1", "blocks.2"]
    assert [name for name, _ in root.params] == [
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "head.weight",
        "head.bias",
    ]
    assert root.modules[0].__class__ is TinyModel


def test_units_inside_a_sequential_of_different_children_are_found() -> None:
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    model = nn.Sequential(nn.Embedding(5, 4), layers)
    units, root = find_units(model)
    assert names(units) == ["1.0", "1.1", "1.2"]
    assert [name for name, _ in root.params] == ["0.weight"]


def test_experts_inside_a_block_do_not_split_it() -> None:
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    units, _ = find_units(nn.ModuleList([Moe(), Moe()]))
    assert names(units) == ["0", "1"]


def test_small_neighbours_share_a_unit() -> None:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)])  # 12 elements each
    units, _ = find_units(model, min_numel=24)
    assert names(units) == ["0..1", "2..3", "4"]
    assert [len(unit.modules) for unit in units] == [2, 2, 1]


def test_tied_parameters_go_to_the_root() -> None:
    units, root = find_units(TinyModel("tied_blocks"))
    assert "blocks.0.up.weight" in [name for name, _ in root.params]
    assert all("up.weight" not in name for unit in units[::2] for name, _ in unit.params)
    _, root = find_units(TinyModel("tied"))
    assert [name for name, _ in root.params].count("embed.weight") == 1


def test_units_can_be_named_by_class_or_glob() -> None:
    units, _ = find_units(TinyModel(), named=["Linear"])
    assert names(units)[:2] == ["blocks.0.up", "blocks.0.down"]
    units, _ = find_units(TinyModel(), named=["blocks.*"])
    assert names(units) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_name_that_matches_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"zero_optimization.units = \['Blok'\]: no module"):
        find_units(TinyModel(), named=["Blok"])


def test_parameters_without_elements_belong_to_no_unit() -> None:
    _, root = find_units(TinyModel("unused"))
    assert "empty" not in [name for name, _ in root.params]
