"""Every stage, precision and accumulation against plain PyTorch.

fp32: loss and gradient norm within 1e-6 relative per step, parameters within 1e-6 of their norm per step,
of plain torch.optim.AdamW on one process; stages 0-3 bit-equal to one another (with accumulation 0 = 1
and 2 = 3: stages 2 and 3 add over ranks before they add over micro-batches).
bf16, fp16: loss within 2 % of fp32's; stages 1-3 bit-equal to one another in the same way.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from models import build, micro_batch
from runs import config

import xds

DEFAULT_RUN = ("mixed_shapes", "checkpointed_reentrant")
STEPS, SAMPLES, CLIP, LR = 3, 4, 0.5, 3e-3
LOW, ACCUMULATIONS = ("bf16", "fp16"), (1, 2)
Case = tuple[int, str, int]  # stage, precision, accumulation


@dataclass(frozen=True)
class Run:
    """A model on so many ranks, at every stage, in fp32 and in each of `low`."""

    feature: str
    world_size: int
    low: tuple[str, ...] = LOW
    accumulations: tuple[int, ...] = ACCUMULATIONS

    @property
    def cases(self) -> list[Case]:
        return list(itertools.product((0, 1, 2, 3), ("fp32", *self.low), self.accumulations))

    @property
    def name(self) -> str:
        more = [*self.low, *map(str, self.accumulations)] if self != Run(self.feature, 2) else []
        return "-".join([self.feature, str(self.world_size), *more])


def config_of(stage: int, precision: str, accumulation: int, world_size: int) -> dict[str, Any]:
    return config(
        stage,
        precision,
        samples=SAMPLES // world_size,
        accumulation=accumulation,
        params={"lr": LR, "weight_decay": 0.1},
        clip=CLIP,
    )


def plain_run(feature: str, accumulation: int, world_size: int) -> dict[str, Any]:
    """Three steps of plain PyTorch, one process, on the batches of all ranks."""
    model = build(feature)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for micro_step in range(accumulation):
            tokens = micro_batch(step, micro_step, SAMPLES)
            for rank, part in enumerate(tokens.chunk(world_size)):
                loss = model(part, rank) / (accumulation * world_size)
                loss.backward()
                total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(params, CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {"losses": losses, "norms": norms, "params": _values(model)}


def _values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("_orig_mod."): param.detach().float().clone()
        for name, param in model.named_parameters()
    }


def engine_run(feature: str, stage: int, precision: str, accumulation: int) -> dict[str, Any]:
    """The same three steps on this rank of an engine."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(feature)
    engine = xds.initialize(model, config_of(stage, precision, accumulation, world_size))
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for micro_step in range(accumulation):
            part = micro_batch(step, micro_step, SAMPLES).chunk(world_size)[rank]
            loss = engine(part, rank)
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / accumulation
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
        norms.append(engine.get_global_grad_norm())
        assert engine.was_step_applied()
    engine.destroy()
    return {"losses": losses, "norms": norms, "params": _values(model)}


def rank_main(run: Run) -> dict[Case, dict[str, Any]]:
    return {case: engine_run(run.feature, *case) for case in run.cases}


def check_equal(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one["losses"] == two["losses"]
    assert one["norms"] == two["norms"]
    for name, value in one["params"].items():
        assert torch.equal(value, two["params"][name]), name


def check_close(name: str, got: torch.Tensor, plain: torch.Tensor) -> None:
    """1e-6 of the tensor's length a step; Adam's own step length is the floor for what starts at zero."""
    scale = max(plain.norm().item(), LR * plain.numel() ** 0.5)
    assert (got - plain).norm().item() <= STEPS * 1e-6 * scale, name


@pytest.mark.parametrize(
    "run",
    [pytest.param(Run(feature, 2), marks=pytest.mark.contract) for feature in DEFAULT_RUN],
    ids=lambda run: run.name,
)
def test_every_combination_matches_plain_pytorch(run: Run) -> None:
    results = run_processes(rank_main, run.world_size, run)
    for case in run.cases:
        for other in results[1:]:  # every rank has the same parameters and norms
            check_equal(results[0][case], other[case])
    for accumulation in run.accumulations:
        plain = plain_run(run.feature, accumulation, run.world_size)
        for stage in (0, 1, 2, 3):
            check_against_plain(results[0], plain, (stage, accumulation), run)
        check_stages_equal(results[0], accumulation, run)


def check_against_plain(mine: Any, plain: dict[str, Any], case: tuple[int, int], run: Run) -> None:
    stage, accumulation = case
    got = mine[stage, "fp32", accumulation]
    assert got["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert got["norms"] == pytest.approx(plain["norms"], rel=1e-6)
    for name, value in plain["params"].items():
        check_close(name, got["params"][name], value)
    for precision in run.low:
        low = mine[stage, precision, accumulation]
        assert low["losses"] == pytest.approx(plain["losses"], rel=2e-2)


def check_stages_equal(mine: Any, accumulation: int, run: Run) -> None:
    groups = {"fp32": [(0, 1, 2, 3)], "bf16": [(1, 2, 3)], "fp16": [(1, 2, 3)]}
    if accumulation > 1 and run.world_size > 1:
        groups = {"fp32": [(0, 1), (2, 3)], "bf16": [(2, 3)], "fp16": [(2, 3)]}
    for precision in ("fp32", *run.low):
        for first, *others in groups[precision]:
            for stage in others:
                check_equal(
                    mine[first, precision, accumulation], mine[stage, precision, accumulation]
                )
