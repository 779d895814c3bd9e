"""The search for layouts: against every point, with keys that stay, and with configs that load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from searched_models import DATA, SOURCE, machine

import xds
from xds.engine.planning.plan import make_plan
from xds.engine.planning.search import Goal, Space, _Search, parsed, search

FIXED = {**DATA, "train_batch_size": 4, "tensor_parallel": {"tp_size": 1}}
FIXED |= {"sequence_parallel_size": 1, "activation_checkpointing": {"enabled": False}}
FIXED |= {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
FIXED |= {"pipeline": {"schedule": "1f1b"}}


def test_the_best_rows_are_those_of_timing_every_point() -> None:
    goal = Goal(2, 2, top=3, seconds=600)
    found = search(SOURCE, FIXED, machine(), goal)
    searching = _Search(SOURCE, FIXED, machine(), goal)
    every: dict[tuple[Any, ...], float] = {}
    for point in searching._space.points():
        for row in searching._rows(point):
            every[row.layout] = min(every.get(row.layout, 1e9), row.sample_seconds)
    best = sorted(every.values())[:3]
    assert [row.sample_seconds for row in found.fastest] == pytest.approx(best)
    assert sorted(row.name for row in found.rows) == ["data 2", "pipe 2"]
    assert found.fastest[0] is found.rows[0]
    assert {row.name for row in found.variants["data 2"]} == {"data 2"}
    assert found.num_points > len(every) > 3


def test_given_keys_stay_and_free_ones_are_filled() -> None:
    data = {
        **DATA,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2},
        "tensor_parallel": {"autotp_size": 1},
    }
    points = list(Space(data, Goal(2, 2), 0, 4, has_experts=False).points())
    assert {point.stage for point in points} == {2} and {point.tensor for point in points} == {1}
    assert {point.steps for point in points} == {1} and len({p.micro_batch for p in points}) == 7
    row = search(SOURCE, data, machine(), Goal(2, 2, top=1)).rows[0]
    assert row.source["zero_optimization"]["stage"] == 2
    assert row.source["tensor_parallel"] == {"autotp_size": 1}
    assert isinstance(row.source["train_micro_batch_size_per_gpu"], int)


def test_the_config_of_a_row_loads_and_gives_its_plan(tmp_path: Path) -> None:
    row = search(SOURCE, DATA, machine(), Goal(2, 2, top=1)).rows[0]
    config = xds.Config.load(row.source, world_size=2)
    plan = make_plan(SOURCE, config, 2, 2)
    assert max(rank.total_bytes for rank in plan.ranks) == row.device_bytes
    assert config.optimizer is not None and config.optimizer.type == "AdamW"


def test_what_does_not_fit_moves_states_or_is_refused_in_one_sentence() -> None:
    whole = search(SOURCE, FIXED, machine(), Goal(2, 2, top=1)).rows[0].device_bytes
    free = {key: value for key, value in FIXED.items() if key != "zero_optimization"}
    less = search(SOURCE, free, machine(whole / 2.5), Goal(2, 2, top=1)).rows[0]
    assert less.device_bytes < whole / 2.5 and less.point.stage > 0
    with pytest.raises(xds.UsageError, match="none of .* layouts fits into"):
        search(SOURCE, FIXED, machine(1e3), Goal(2, 2))


def test_tokens_that_are_no_whole_samples_are_refused() -> None:
    with pytest.raises(xds.UsageError, match="--tokens-per-step 10"):
        Space(DATA, Goal(2, 2, tokens=10), 3, 4, has_experts=False)


def test_values_of_a_trainer_stand_for_auto() -> None:
    data = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    data |= {"train_micro_batch_size_per_gpu": 1}
    assert parsed(data).resolve(2).optimizer is not None
