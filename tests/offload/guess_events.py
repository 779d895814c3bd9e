"""Test helper: what a script may do between backward and step(), one event a step, with and without guesses."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import build, micro_batch
from offload_runs import SAMPLES, config_of

import xds
from xds.engine.steps.forecast import Forecast


def run(
    stage: int, precision: str, accumulation: int, offload: dict[str, Any] | None
) -> dict[str, Any]:
    """Every number of one step for each event, and of a plain step after it."""
    config = config_of(stage, precision, accumulation, offload, "AdamW")
    config["gradient_clipping"] = 1e3
    engine = xds.initialize(build("plain"), config)
    numbers: list[Any] = []
    with mock.patch.object(Forecast, "is_plain", lambda forecast, limit: True):
        for at, event in enumerate(("nothing", *BETWEEN, "twice", "overflow")):
            numbers += [event, *_step(engine, 2 * at, event)]
            numbers += _step(engine, 2 * at + 1, "nothing")
    guesses = engine._parts.updater._guesses
    used = guesses.num_used if guesses is not None else 0
    values = engine.full_state_dict(rank0_only=False, full_precision=True)
    computed = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return {"numbers": numbers, "values": values, "computed": computed, "used": used}


def _loss(engine: xds.Engine, step: int, micro_step: int) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loss: torch.Tensor = engine(
        micro_batch(step, micro_step, SAMPLES).chunk(world_size)[rank], rank
    )
    return loss


def _step(engine: xds.Engine, step: int, event: str) -> list[Any]:
    accumulation = engine.gradient_accumulation_steps()
    for micro_step in range(accumulation):
        loss = _loss(engine, step, micro_step)
        if event == "twice":
            engine.backward(loss, retain_graph=True)
        if event == "overflow" and engine.config.fp16.enabled:
            loss = loss * torch.inf
        engine.backward(loss)
        if micro_step == accumulation - 1:
            weight = dict(engine.module.named_parameters())["blocks.1.up.weight"]
            found = [BETWEEN[event](engine, weight)] if event in BETWEEN else []
        engine.step()
    numbers = [loss.item(), engine.get_global_grad_norm(), engine.was_step_applied()]
    return [*numbers, *engine.get_lr(), *found]


def _write_grad(engine: xds.Engine, weight: torch.nn.Parameter) -> None:
    xds.zero.set_full_grad(weight, torch.full_like(xds.zero.get_full_grad(weight), 0.01))


def _write_param(engine: xds.Engine, weight: torch.nn.Parameter) -> None:
    with xds.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.mul_(0.9)


@torch.no_grad()
def _halve_states(engine: xds.Engine, weight: torch.nn.Parameter) -> None:
    for state in engine.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def _halve_rate(engine: xds.Engine, weight: torch.nn.Parameter) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 0.5


def _evaluate(engine: xds.Engine, weight: torch.nn.Parameter) -> float:
    with torch.no_grad():
        return _loss(engine, 100, 0).item()


def _start_again(engine: xds.Engine, weight: torch.nn.Parameter) -> None:
    engine.zero_grad()
    engine.backward(_loss(engine, 50, 0))


def _fail(engine: xds.Engine, weight: torch.nn.Parameter) -> str:
    try:
        engine.backward(_loss(engine, 70, 0) * torch.ones(3))
    except Exception as error:
        return type(error).__name__
    return "nothing"


def _hold(engine: xds.Engine, weight: torch.nn.Parameter) -> None:
    loss = _loss(engine, 60, 0)
    with engine.no_sync():
        engine.backward(loss)


def _whole(engine: xds.Engine, weight: torch.nn.Parameter) -> list[float]:
    found = engine.full_state_dict(rank0_only=False, full_precision=True)
    return [value.double().sum().item() for value in found.values()]


def _sum(tensor: torch.Tensor) -> float:
    return tensor.double().sum().item()


BETWEEN: dict[str, Any] = {
    "rate": _halve_rate,
    "read_master": lambda engine, weight: _sum(xds.zero.get_full_param(weight)),
    "read_state": lambda engine, weight: _sum(
        xds.zero.get_full_optimizer_state(weight, "exp_avg_sq")
    ),
    "read_grad": lambda engine, weight: _sum(xds.zero.get_full_grad(weight)),
    "read_all": _whole,
    "halve_states": _halve_states,
    "clear_states": lambda engine, weight: engine.optimizer.state.clear(),
    "write_grad": _write_grad,
    "write_param": _write_param,
    "freeze": lambda engine, weight: weight.requires_grad_(False).shape,
    "evaluate": _evaluate,
    "clip": lambda engine, weight: engine.clip_grad_norm(0.01),
    "start_again": _start_again,
    "fail": _fail,
    "hold": _hold,
}
