"""The loss scale as a table: DeepSpeed's trajectory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import run_ranks

import xds
from xds.engine.optim.loss_scale import (
    DynamicScale,
    NoScale,
    StaticScale,
    running_loss_scale,
    scaled_backward,
)
from xds.utils.errors import XdsError


@pytest.mark.parametrize(
    ("steps", "window", "hysteresis", "consecutive", "want"),
    [
        # '.' a good step, 'x' an overflow; the scale after each, from 16
        ("....", 2, 1, False, [16, 16, 32, 32]),
        ("x..x", 100, 1, False, [8, 8, 8, 4]),
        ("xx.x", 100, 2, False, [16, 8, 8, 4]),
        ("x.x.x", 100, 2, True, [16, 16, 16, 16, 16]),
        ("x.x.x", 100, 2, False, [16, 16, 8, 8, 4]),
        (
            ".x...x",
            2,
            2,
            False,
            [16, 16, 16, 16, 32, 32],
        ),  # hysteresis comes back as the scale grows
        (
            ".x....",
            3,
            2,
            False,
            [16, 16, 16, 16, 16, 32],
        ),  # what hysteresis absorbs begins a new window
    ],
)
def test_dynamic_scale(
    steps: str, window: int, hysteresis: int, consecutive: bool, want: list[int]
) -> None:
    scale = DynamicScale(16.0, window, hysteresis, consecutive=consecutive, minimum=1.0)
    seen = []
    for step in steps:
        scale.after_step(overflow=step == "x")
        seen.append(scale.value)
    assert seen == want


@pytest.mark.parametrize("saved_after", range(6))
def test_a_restored_scale_goes_on_as_the_saved_one(saved_after: int) -> None:
    def new() -> DynamicScale:
        return DynamicScale(2.0**20, 2, 3, consecutive=False, minimum=1.0)

    scale, restored = new(), new()
    for number, step in enumerate("xx.x..x.xxx...xx"):
        if number == saved_after:
            restored.load_state_dict(scale.state_dict())
        scale.after_step(overflow=step == "x")
        if number >= saved_after:
            restored.after_step(overflow=step == "x")
            assert restored.value == scale.value and restored.state_dict() == scale.state_dict()


def test_the_minimum_ends_the_run_with_a_sentence() -> None:
    scale = DynamicScale(2.0, 100, 1, consecutive=False, minimum=1.0)
    scale.after_step(overflow=True)
    assert scale.value == 1.0
    scale = DynamicScale(3.0, 100, 1, consecutive=False, minimum=2.0)
    scale.after_step(overflow=True)
    assert scale.value == 2.0  # not half of 3
    with pytest.raises(XdsError, match="min_loss_scale = 2: the model diverges in fp16"):
        scale.after_step(overflow=True)


def test_static_and_no_scale_stay() -> None:
    for scale in (StaticScale(128.0), NoScale(skips_overflow=False)):
        before = scale.value
        scale.after_step(overflow=True)
        assert scale.value == before


def test_the_scale_is_that_of_the_innermost_backward() -> None:
    """One engine's backward may run another one's, as a step inside of an autograd function does."""
    assert running_loss_scale() is None
    with scaled_backward(8.0):
        with scaled_backward(2.0):
            assert running_loss_scale() == 2.0
        assert running_loss_scale() == 8.0
    assert running_loss_scale() is None


def test_the_scale_stays_in_the_range_of_fp32() -> None:
    scale = DynamicScale(2.0**126, 1, 1, consecutive=False, minimum=1.0)
    for _ in range(4):
        scale.after_step(overflow=False)
    assert scale.value == 2.0**127


EXTREMES = [
    {"loss_scale": 1e-30},
    {"loss_scale": 1e30},
    {"initial_scale_power": 127},
    {"initial_scale_power": 0, "min_loss_scale": 1e-30, "hysteresis": 1},
]


def train_at(fp16: dict[str, Any]) -> None:
    model = torch.nn.Linear(3, 3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "fp16": {"enabled": True, "loss_scale_window": 1, **fp16},
    }
    engine = xds.initialize(model, config)
    for _ in range(6):
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3).half()).float().sum())
            engine.step()
    assert all(value.isfinite().all() for value in engine.state_dict().values())
    engine.destroy()


@pytest.mark.parametrize("fp16", EXTREMES, ids=str)
def test_the_ends_of_the_range_train(fp16: dict[str, Any]) -> None:
    run_ranks(train_at, 1, fp16)
