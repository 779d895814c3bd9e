"""Tests of `xds.deepspeed.runtime`: configs, schedules, norms, cuts, loss scales and checkpointed calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_processes
from torch import nn

import xds.deepspeed as deepspeed
from xds.deepspeed.runtime import lr_schedules
from xds.deepspeed.runtime.activation_checkpointing import checkpointing
from xds.deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
from xds.deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from xds.deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

# -- configs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"train_batch_size": 64}, (64, 64, 1)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, (64, 16, 4)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}, (64, 8, 8)),
        ({"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}, (16, 8, 2)),
    ],
)
def test_a_config_works_out_its_batch_sizes(
    given: dict[str, int], sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    for source in (given, str(path)):
        config = DeepSpeedConfig(source)
        assert sizes == (
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        )


@pytest.mark.parametrize("kind", [ValueError, AssertionError])
def test_batch_sizes_that_do_not_fit_are_refused(kind: type[Exception]) -> None:
    for wrong in (
        {"gradient_accumulation_steps": 2},
        {"train_batch_size": 33, "train_micro_batch_size_per_gpu": 17},
        {"train_batch_size": "8"},
    ):
        with pytest.raises(kind):
            DeepSpeedConfig(wrong)


def test_a_config_has_deepspeeds_attributes_and_defaults() -> None:
    config = DeepSpeedConfig(
        {
            "train_batch_size": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2},
        }
    )
    assert (config.optimizer_name, config.optimizer_params) == ("adamw", {"lr": 1e-3})
    assert config.zero_enabled and config.zero_optimization_stage == 2 == config.zero_config.stage
    assert config.bfloat16_enabled and not config.fp16_enabled and config.loss_scale == 0
    assert config.gradient_clipping == 1.0 and config.scheduler_name is None
    assert DtypeEnum("torch.bfloat16").value == torch.bfloat16 == DtypeEnum("bf16").value


# -- schedules --------------------------------------------------------------------------------------------


def test_a_schedule_refuses_as_deepspeeds_does() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="warmup_num_steps"):
        lr_schedules.WarmupLR(optimizer, warmup_num_steps=-5)
    with pytest.raises(ValueError, match="cycle_first_step_size"):
        lr_schedules.OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=0)


def test_curriculum_rises_in_steps_between_its_limits() -> None:
    section = {"total_curriculum_step": 100, "difficulty_step": 16}
    scheduler = CurriculumScheduler(
        {
            "min_difficulty": 8,
            "max_difficulty": 1000,
            "schedule_type": "fixed_linear",
            "schedule_config": section,
        }
    )
    found = [scheduler.update_difficulty(step) for step in range(120)]
    assert found[0] == 16 and found[-1] == 1000 and found == sorted(found)
    assert all(one % 16 == 0 for one in found if one < 1000)


# -- engine -----------------------------------------------------------------------------------------------


def made(stage: int, **more: Any) -> Any:
    model = nn.Linear(4, 4)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)


def refusals_and_scales() -> None:
    with pytest.raises(AssertionError, match="incompatible.*coalesce_grad_reduction"):
        made(2)[0].no_sync()
    engine = made(1)[0]
    with engine.no_sync():
        engine.backward(engine(torch.ones(1, 4)).sum())
        with pytest.raises(AssertionError, match="reentry is unsupported"):
            engine.no_sync()
        with pytest.raises(AssertionError, match="illegal to call Engine.step"):
            engine.step()
    optimizer = made(0, fp16={"enabled": True, "initial_scale_power": 8})[1]
    assert optimizer.dynamic_loss_scale and optimizer.cur_scale == 256
    optimizer = made(0, bf16={"enabled": True})[1]
    assert not optimizer.dynamic_loss_scale and optimizer.cur_scale == 1
    assert optimizer.low_precision_dtype == torch.bfloat16


def test_no_sync_refuses_and_the_optimizer_tells_its_loss_scale() -> None:
    run_processes(refusals_and_scales, 1)


def without_optimizer(stage: int) -> None:
    model = nn.Linear(4, 4)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}}
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
    loss = engine(torch.ones(1, 4)).sum()
    assert optimizer is None and not loss.requires_grad
    with pytest.raises(AssertionError, match="only infers"):
        engine.backward(loss)


@pytest.mark.parametrize("stage", [0, 3])
def test_without_an_optimizer_the_engine_infers(stage: int) -> None:
    run_processes(without_optimizer, 1, stage)


def test_a_dynamic_scale_can_stay_at_its_minimum() -> None:
    scaler = DynamicLossScaler(4.0, 2, 1.0, 1, False, raise_error_at_min_scale=False)
    for expected in (2.0, 1.0, 1.0):
        scaler.update_scale(True)
        assert scaler.loss_scale == expected
    for _ in range(3):
        scaler.update_scale(False)
    assert (scaler.loss_scale, scaler.cur_iter, scaler.last_overflow_iter) == (2.0, 6, 2)


def test_a_tracked_random_state_goes_on_where_it_was() -> None:
    tracker = checkpointing.CudaRNGStatesTracker()
    before = torch.get_rng_state()
    tracker.add("dropout", 7)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = []
    for _ in range(2):
        with tracker.fork("dropout"):
            drawn.append(torch.rand(3))
    torch.manual_seed(7)
    assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(3), torch.rand(3)]))
    with pytest.raises(ValueError, match="must be new"):
        tracker.add("other", 7)


def test_contiguous_checkpoints_need_their_number() -> None:
    with pytest.raises(AssertionError, match="num_checkpoints"):
        deepspeed.checkpointing.configure(
            None, partition_activations=True, contiguous_checkpointing=True
        )
