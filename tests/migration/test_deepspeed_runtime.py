"""Tests of `xds.deepspeed.runtime`: configs, schedules, norms, cuts, loss scales and checkpointed calls."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from pydantic import Field, ValidationError
from torch import nn

import xds.deepspeed as deepspeed
from xds.deepspeed.runtime import lr_schedules, utils
from xds.deepspeed.runtime.activation_checkpointing import checkpointing
from xds.deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
from xds.deepspeed.runtime.config_utils import DeepSpeedConfigModel
from xds.deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from xds.deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from xds.deepspeed.runtime.precision_config import DeepSpeedFP16Config, get_bfloat16_config
from xds.deepspeed.runtime.sparse_tensor import SparseTensor

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


class Sizes(DeepSpeedConfigModel):
    size: list[int] | None = None
    old_size: int | None = Field(
        None,
        json_schema_extra={  # type: ignore[arg-type]  # a function, as DeepSpeed's sections have
            "deprecated": True,
            "new_param": "size",
            "new_param_fn": lambda value: [value],
        },
    )


def test_a_deprecated_field_moves_to_the_one_that_replaces_it() -> None:
    assert Sizes(old_size=3).size == [3]
    assert Sizes(size="auto").size is None
    with pytest.raises(AssertionError, match="replaces"):
        Sizes(size=[1], old_size=3)
    with pytest.raises(ValidationError):
        Sizes(sise=[1])


def test_precision_sections_check_the_loss_scale() -> None:
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    for wrong in (-1, math.inf, True, []):
        with pytest.raises(ValidationError):
            DeepSpeedFP16Config(loss_scale=wrong)
    assert DeepSpeedFP16Config(initial_scale_power=4).dynamic_loss_scale_args()["init_scale"] == 16


# -- schedules --------------------------------------------------------------------------------------------


def test_command_line_arguments_make_a_schedule() -> None:
    parser = lr_schedules.add_tuning_arguments(argparse.ArgumentParser())
    words = "--lr_schedule OneCycle --cycle_max_lr 0.2 --cycle_first_step_size 4".split()
    section, why_not = lr_schedules.get_config_from_args(parser.parse_args(words))
    assert section is not None and why_not is None
    assert lr_schedules.get_lr_from_config(section) == (0.2, "")
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    schedule = lr_schedules.OneCycle(optimizer, **section["params"])
    assert (
        schedule.second_step_size == schedule.first_step_size == 4 and not schedule.cycle_momentum
    )
    assert lr_schedules.get_config_from_args(parser.parse_args([]))[0] is None


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


# -- tensors ----------------------------------------------------------------------------------------------


def test_layers_are_cut_into_parts_of_nearly_equal_weight() -> None:
    assert utils.partition_balanced([0, 1, 2, 3, 3, 3], 4) == [0, 3, 4, 5, 6]
    assert utils.partition_balanced([0.0, 1.1, 30, 3.0], 3) == [0, 2, 3, 4]
    assert utils.partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert utils.partition_uniform(2, 4) == [0, 1, 2, 2, 2]


def norms_and_parts() -> None:
    rank, whole = dist.get_rank(), torch.arange(21.0).view(7, 3)
    part = utils.PartitionedTensor(whole, dist.group.WORLD)
    again = utils.PartitionedTensor.from_meta(part.to_meta(), part.data(), dist.group.WORLD)
    assert torch.equal(part.full(), whole) and torch.equal(again.full(), whole)

    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for param in params:
        param.grad = torch.tensor([3.0, -4.0])
    expected = torch.nn.utils.get_total_norm([param.grad for param in params], 3)
    assert torch.allclose(utils.clip_grad_norm_(params, 1.0, norm_type=3), expected)
    assert math.isclose(utils.get_flattened_grad_norm(params, norm_type=3), 1.0, rel_tol=1e-5)

    params[0].grad = torch.tensor([0.0, math.inf if rank else 1.0])
    assert utils.CheckOverflow([params]).check() == bool(rank)
    params[0].allreduce = False  # type: ignore[attr-defined]  # an expert: its ranks differ
    assert utils.CheckOverflow([params]).check()


def test_norms_and_parts_are_those_of_all_ranks() -> None:
    run_ranks(norms_and_parts, 2)


def test_sparse_rows_add_up() -> None:
    rows = torch.zeros(4, 3).index_fill(0, torch.tensor([0, 2]), 1.0)
    one, other = SparseTensor(rows), SparseTensor(rows.to_sparse(1))
    one.add(other)
    assert torch.equal(one.to_dense(), 2 * rows)


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
    scale = optimizer.loss_scale_config
    assert optimizer.needs_scaler() and scale.dynamic_loss_scale and scale.cur_scale == 256
    optimizer = made(0, bf16={"enabled": True})[1]
    assert not optimizer.needs_scaler() and optimizer.loss_scale_config.cur_scale == 1
    assert optimizer.low_precision_dtype == torch.bfloat16


def test_no_sync_refuses_and_the_optimizer_tells_its_loss_scale() -> None:
    run_ranks(refusals_and_scales, 1)


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
    run_ranks(without_optimizer, 1, stage)


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
