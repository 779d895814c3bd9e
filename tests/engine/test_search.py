"""The search for layouts: against every point, with keys that stay, and with configs that load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from searched_models import DATA, SOURCE, machine
from torch import nn

import xds
from xds.engine.planning.cache import PlanCache
from xds.engine.planning.models import ModelSource, ResizedBatches
from xds.engine.planning.plan import make_plan
from xds.engine.planning.search import RATIO, RESERVE, Goal, Space, _Search, parsed, search

FIXED = {**DATA, "train_batch_size": 4, "tensor_parallel": {"tp_size": 1}}
FIXED |= {"sequence_parallel_size": 1, "activation_checkpointing": {"enabled": False}}
FIXED |= {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
FIXED |= {"pipeline": {"schedule": "1f1b"}}


class Llama(ModelSource):
    name = "llama"

    def build(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, vocab_size=61))

    def batch(self, micro_batch_size: int) -> Any:
        tokens = torch.zeros((micro_batch_size, 12), dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}


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


def test_tensor_ranks_share_tokens_and_logits_where_the_file_lets_them() -> None:
    source = ResizedBatches(Llama())
    data = {**DATA, "tensor_parallel": {"tp_size": 2}, "train_micro_batch_size_per_gpu": 2}
    data |= {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 1}}
    data |= {"sequence_parallel_size": 1}
    row = search(source, data, machine(), Goal(2, 2, top=1)).rows[0]
    section = row.source["tensor_parallel"]
    assert section["plan"]["model.layers.*.input_layernorm"] == "sequence_parallel"
    assert section["vocab_parallel_lm_head"] and section["tp_size"] == 2
    assert "tensor all_to_all" in row.seconds.exposed
    whole = search(source, {**data, "compile": {"enabled": True}}, machine(), Goal(2, 2, top=1))
    assert "plan" not in whole.rows[0].source["tensor_parallel"]


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


def test_the_host_gets_as_much_of_the_states_as_does_not_fit() -> None:
    data = {**FIXED, "pipeline": {"stages": 1}, "zero_optimization": {"stage": 2}}
    data["train_micro_batch_size_per_gpu"] = 2
    whole = search(SOURCE, data, machine(), Goal(2, 2)).rows[0]
    less = whole.device_bytes * 0.8
    row = search(SOURCE, data, machine(less / (1 - RESERVE)), Goal(2, 2)).rows[0]
    assert 0 < row.more[RATIO] < 0.6 and row.device_bytes <= less  # its few buffers move whole
    moving = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}
    every = search(SOURCE, {**data, "zero_optimization": moving}, machine(), Goal(2, 2)).rows[0]
    assert whole.sample_seconds < row.sample_seconds <= every.sample_seconds


@pytest.mark.parametrize(
    "more",
    [
        {"tensor_parallel": {"tp_size": 3}},
        {"pipeline": {"stages": 7}},
        {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2},
    ],
)
def test_limits_that_no_layout_keeps_are_named(more: dict[str, Any]) -> None:
    with pytest.raises(
        xds.UsageError, match=r"no layout of 2 ranks has .* = \d: tensor x pipeline"
    ):
        search(SOURCE, {**DATA, **more}, machine(), Goal(2, 2))


def test_no_tensor_ranks_are_one() -> None:
    data = {**DATA, "tensor_parallel": {"tp_size": 0}}
    points = list(Space(data, Goal(2, 2), 0, 4, has_experts=False).points())
    assert {point.tensor for point in points} == {1}


@pytest.mark.parametrize("value", ["all", True, 1.5, [0, 1]])
def test_a_key_that_is_no_number_is_told(value: Any) -> None:
    data = {**DATA, "zero_optimization": {"stage": value}}
    with pytest.raises(
        xds.ConfigError, match=r"zero_optimization.stage = .*: must be a whole number"
    ):
        search(SOURCE, data, machine(), Goal(2, 2))


def test_tokens_that_are_no_whole_samples_are_refused() -> None:
    with pytest.raises(xds.UsageError, match="--tokens-per-step 10"):
        Space(DATA, Goal(2, 2, tokens=10), 3, 4, has_experts=False)


def test_values_of_a_trainer_stand_for_auto() -> None:
    data = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    data |= {"train_micro_batch_size_per_gpu": 1}
    assert parsed(data).resolve(2).optimizer is not None


@pytest.mark.parametrize("pipe", [{}, {"stages": 2, "schedule": "1f1b"}])
def test_a_plan_of_a_search_is_that_of_a_new_one(pipe: dict[str, Any]) -> None:
    data = {**DATA, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    data |= {"zero_optimization": {"stage": 3}, "tensor_parallel": {"tp_size": 2}, "pipeline": pipe}
    source, cache = ResizedBatches(Llama()), PlanCache(ResizedBatches(Llama()))
    fresh = make_plan(source, parsed(data), 8, 2, traces=True)
    for traces in (False, True):  # the second adds traces to parts of the first
        plan = make_plan(source, parsed(data), 8, 2, cache, traces=traces)
        assert [rank.states for rank in plan.ranks] == [rank.states for rank in fresh.ranks]
        assert [rank.sent for rank in plan.ranks] == [rank.sent for rank in fresh.ranks]
    assert all(rank.share.trace for rank in fresh.ranks)
    assert [r.share.trace for r in plan.ranks] == [r.share.trace for r in fresh.ranks]


def test_stages_of_the_file_may_need_more_micro_batches_than_an_estimate() -> None:
    data = {**FIXED, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}
    found = search(SOURCE, data, machine(), Goal(2, 2, top=1))
    assert found.rows[0].point.pipe == 2
