"""Learning-rate schedules against tables worked out by hand."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from helpers import run_ranks
from runs import config

import xds
from xds import UsageError
from xds.engine.config.scheduler import SchedulerConfig
from xds.engine.optim import schedules
from xds.engine.optim.variable_batch import VariableBatchSizeLR


def adamw(*lrs: float) -> torch.optim.AdamW:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    return torch.optim.AdamW(groups)


def lrs_of(schedule: schedules.Schedule, num_steps: int) -> list[float]:
    """The lr of group 0 that optimizer steps 0, 1, 2, ... run with."""
    seen = []
    for _ in range(num_steps):
        seen.append(schedule.get_last_lr()[0])
        schedule.step()
    return seen


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        (
            "WarmupLR",
            {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"},
            [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0],
        ),
        (
            "WarmupDecayLR",
            {
                "total_num_steps": 4,
                "warmup_min_lr": 0.5,
                "warmup_max_lr": 1.0,
                "warmup_num_steps": 2,
                "warmup_type": "linear",
            },
            [0.5, 0.5, 0.75, 1.0, 0.75, 0.5, 0.5],
        ),
        (
            "WarmupCosineLR",
            {
                "total_num_steps": 4,
                "warmup_num_steps": 2,
                "warmup_type": "linear",
                "cos_min_ratio": 0.0,
            },
            [0.0, 0.0, 0.1, 0.1, 0.0, 0.0],
        ),
        (
            "WarmupLR",  # in logarithms
            {"warmup_max_lr": 1.0, "warmup_num_steps": 4},
            [0.0, 0.0, 0.5, log(3) / log(4), 1.0],
        ),
        (
            "LRRangeTest",
            {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 1},
            [0.5, 1.0, 1.5, 2.0],
        ),
        (
            "LRRangeTest",
            {
                "lr_range_test_min_lr": 1.0,
                "lr_range_test_step_size": 2,
                "lr_range_test_staircase": True,
            },
            [1.0, 1.0, 2.0, 2.0, 3.0],
        ),
        (
            "OneCycle",  # in stairs
            {
                "cycle_min_lr": 0.0,
                "cycle_max_lr": 2.0,
                "cycle_first_step_size": 4,
                "cycle_second_step_size": 4,
                "cycle_first_stair_count": 2,
                "cycle_second_stair_count": 1,
            },
            [0, 0, 1, 1, 2, 0, 0, 0],
        ),
        (
            "OneCycle",
            {
                "cycle_min_lr": 1.0,
                "cycle_max_lr": 3.0,
                "cycle_first_step_size": 2,
                "decay_step_size": 1,
                "decay_lr_rate": 1.0,
            },
            # up, down, then 1 / (1 + n) once the cycle of 4 iterations is over
            [1.0, 2.0, 3.0, 2.0, 1.0, 1 / 2, 1 / 3, 1 / 4],
        ),
    ],
)
def test_lr_of_each_optimizer_step(
    name: str, params: dict[str, Any], expected: list[float]
) -> None:
    schedule = schedules.build_scheduler(SchedulerConfig(type=name, params=params), adamw(0.2))
    assert isinstance(schedule, schedules.Schedule)
    assert lrs_of(schedule, len(expected)) == pytest.approx(expected)


def test_one_cycle_moves_beta1_against_the_lr() -> None:
    optimizer = adamw(0.1)
    schedule = schedules.OneCycle(optimizer, 1.0, 2.0, cycle_first_step_size=2, decay_step_size=0)
    beta1s = []
    for _ in range(7):
        beta1s.append(optimizer.param_groups[0]["betas"][0])
        schedule.step()
    assert beta1s == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.9, 0.9])
    assert optimizer.param_groups[0]["betas"][1] == 0.99


def test_one_cycle_without_betas_warns() -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.warns(UserWarning, match="cycle_momentum has no effect"):
        schedule = schedules.OneCycle(sgd, 1.0, 2.0)
    assert schedule.get_mom() is None


def test_lists_and_missing_maximum_are_per_group() -> None:
    optimizer = adamw(0.1, 0.4)
    schedule = schedules.WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    schedule.step(1)
    assert schedule.get_last_lr() == [0.05, 0.2]
    schedule = schedules.WarmupLR(optimizer, [0.0, 1.0], [2.0, 3.0], 2, "linear")
    assert schedule.get_last_lr() == [0.0, 1.0]
    schedule.step(1)
    assert schedule.get_last_lr() == [1.0, 2.0]


def test_tensor_lr_is_filled_in_place() -> None:
    optimizer = adamw(0.0)
    lr = torch.tensor(0.5)
    optimizer.param_groups[0]["lr"] = lr
    schedule = schedules.LRRangeTest(optimizer, 1.0, 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 2.0


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3}),
        ("StepLR", {"step_size": 2}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step")
def test_resumed_equals_uninterrupted(name: str, params: dict[str, Any]) -> None:
    whole, first, second = adamw(0.1), adamw(0.1), adamw(0.1)
    straight = schedules.build_scheduler(SchedulerConfig(type=name, params=params), whole)
    before = schedules.build_scheduler(SchedulerConfig(type=name, params=params), first)
    after = schedules.build_scheduler(SchedulerConfig(type=name, params=params), second)
    for _ in range(4):
        straight.step()
        before.step()
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    for _ in range(4):
        straight.step()
        after.step()
    assert whole.param_groups[0]["lr"] == second.param_groups[0]["lr"]
    assert whole.param_groups[0]["betas"] == second.param_groups[0]["betas"]


def test_state_dict_key() -> None:
    schedule = schedules.WarmupLR(adamw(0.1))
    schedule.step()
    assert schedule.state_dict() == {"last_batch_iteration": 0}
    with pytest.raises(UsageError, match="last_batch_iteration"):
        schedule.load_state_dict({"last_epoch": 3})


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps = -1"),
        ("WarmupLR", {"warmup_type": "cosine"}, "'log' or 'linear'"),
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, "1 parameter groups"),
        ("WarmupLR", {"warmup_max_lr": "auto"}, "needs a number"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "first"),
    ],
)
def test_refusals(name: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        schedules.build_scheduler(SchedulerConfig(type=name, params=params), adamw(0.1))


def test_rates_of_unequal_batches_follow_a_schedule_of_torch_exactly() -> None:
    sizes, optimizer = [4, 2, 6, 1], adamw(1.0, 0.5)
    base = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = VariableBatchSizeLR(base, optimizer, sizes, 4)
    seen = []
    for _ in range(6):
        seen.append(rates.get_last_lr())
        optimizer.step()
        rates.step()
    factors = [0.5**step * sizes[step % 4] / 4 for step in range(6)]
    assert seen == [[factor, 0.5 * factor] for factor in factors]


def test_too_few_total_steps_warns() -> None:
    with pytest.warns(UserWarning, match="below warmup_num_steps"):
        schedules.WarmupDecayLR(adamw(0.1), total_num_steps=3, warmup_num_steps=5)


def lrs_after(schedule: dict[str, Any]) -> list[float]:
    """After each step of an engine; gradients of the first three overflow."""
    settings = config(0, "fp16", optimizer="SGD", params={"lr": 0.1}, scheduler=schedule)
    engine = xds.initialize(torch.nn.Linear(2, 1), settings)
    seen = []
    for number in range(5):
        x = torch.full((2, 2), torch.inf if number < 3 else 0.1)
        engine.backward(engine(x.half()).float().sum())
        engine.step()
        seen.append(engine.get_lr()[0])
    assert engine.skipped_steps == 3
    engine.destroy()
    return seen


def test_a_skipped_step_leaves_the_schedule() -> None:
    warmup = {"warmup_num_steps": 4, "warmup_max_lr": 0.4, "warmup_type": "linear"}
    (seen,) = run_ranks(lrs_after, 1, {"type": "WarmupLR", "params": warmup})
    assert seen == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.1])
    halving = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    assert run_ranks(lrs_after, 1, halving) == [pytest.approx([0.1, 0.1, 0.1, 0.05, 0.025])]
