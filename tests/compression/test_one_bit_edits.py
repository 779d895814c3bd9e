"""1-bit Adam: what a script writes to parameters before the freeze, and between it and the first message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from warm_ranks import warm

import xds
from xds.zero import get_full_param

FREEZE = 3


class Two(nn.Module):
    """Two parameters of odd sizes in one flat buffer, whose gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.one = nn.Parameter(torch.randn(37, 3, generator=generator))
        self.two = nn.Parameter(torch.randn(203, generator=generator))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        one, two = (torch.randn(p.shape, generator=generator) for p in (self.one, self.two))
        return (self.one * one).sum() + (self.two * two).sum()


def build(stage: int, kind: str, more: dict[str, Any]) -> xds.Engine:
    params: dict[str, Any] = {"lr": 1e-2}
    if kind == "OneBitAdam":
        params["freeze_step"] = FREEZE
    return xds.initialize(
        Two(),
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": kind, "params": params},
            "zero_optimization": {"stage": stage},
            **more,
        },
    )


def step(engine: xds.Engine, number: int) -> None:
    engine.backward(engine(number))
    engine.step()


def write(engine: xds.Engine) -> None:
    with torch.no_grad():
        engine.module.one.mul_(1.5)


def masters(engine: xds.Engine) -> list[Tensor]:
    return [get_full_param(param).clone() for param in (engine.module.one, engine.module.two)]


def write_before_the_freeze(stage: int, kind: str, reads: bool) -> list[Tensor]:
    engine = build(stage, kind, {})
    for number in range(FREEZE):
        if number == 1:
            write(engine)
            if reads:
                assert get_full_param(engine.module.one).equal(engine.module.one)
        step(engine, number)
    found = masters(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("reads", [False, True])
def test_writes_in_exact_steps_are_those_of_adam(stage: int, reads: bool) -> None:
    expected = warm(2).run(write_before_the_freeze, stage, "AdamW", reads)[0]
    for found in warm(2).run(write_before_the_freeze, stage, "OneBitAdam", reads):
        for one, other in zip(found, expected, strict=True):
            assert one.equal(other)


def write_at_the_freeze(stage: int, precision: str, folder: str) -> Any:
    """The masters before a write, and after it and a step of rate 0. folder: where to stop between, or ""."""
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    engine = build(stage, "OneBitAdam", more)
    for number in range(FREEZE):
        step(engine, number)
    if folder:
        engine.save_checkpoint(folder)
        engine.destroy()
        engine = build(stage, "OneBitAdam", more)
        engine.load_checkpoint(folder)
    before = masters(engine)
    write(engine)
    written = engine.module.one.detach().float().clone()
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    step(engine, FREEZE)
    after = masters(engine)
    engine.destroy()
    return before, written, after


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_write_before_the_first_message_leaves_other_masters_exact(
    stage: int, precision: str, resumes: bool, tmp_path: Any
) -> None:
    folder = str(tmp_path) if resumes else ""
    for before, written, after in warm(2).run(write_at_the_freeze, stage, precision, folder):
        assert after[0].equal(written)
        assert after[1].equal(before[1])


def betas_of_two(stage: int) -> str:
    """The message for two groups with other first betas."""
    model = Two()
    groups = [{"params": [model.one], "betas": (0.8, 0.99)}, {"params": [model.two]}]
    params = {"lr": 1e-2, "freeze_step": FREEZE}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "OneBitAdam", "params": params},
        "zero_optimization": {"stage": stage},
    }
    try:
        xds.initialize(model, config, model_parameters=groups)
    except xds.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 2])
def test_several_first_betas_are_refused(stage: int) -> None:
    for message in warm(2).run(betas_of_two, stage):
        assert "several first betas (0.8, 0.9)" in message and "the same betas" in message


def reloaded_lamb(folder: str) -> None:
    """Saves after the optimizer was given its own state."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "OneBitLamb", "params": {"lr": 1e-2, "freeze_step": FREEZE}},
        "zero_optimization": {"stage": 1},
    }
    engine = xds.initialize(Two(), config)
    for number in range(FREEZE + 2):
        step(engine, number)
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    engine.save_checkpoint(folder)
    step(engine, FREEZE + 2)
    engine.destroy()


def test_one_bit_lamb_is_saved_after_load_state_dict(tmp_path: Any) -> None:
    warm(2).run(reloaded_lamb, str(tmp_path))
    assert (tmp_path / "latest").exists()
