"""Every stage, precision and accumulation against plain PyTorch, with AdamW and with SGD.

Adam and clipping hide a factor on all gradients, SGD shows it. AdamW clips here; SGD runs without a limit, or
with one above each norm.

fp32: loss and gradient norm within 1e-6 relative per step, parameters within 1e-6 of their norm per step,
of plain torch.optim on one process; stages 0-3 bit-equal to one another (with accumulation 0 = 1
and 2 = 3: stages 2 and 3 add over ranks before they add over micro-batches).
bf16, fp16: loss and norm within 2 % of fp32's; stages 1-3 bit-equal to one another in the same way.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from models import build, micro_batch
from runs import config, plain

import xds

DEFAULT_RUN = ("mixed_shapes", "checkpointed_reentrant")
STEPS, SAMPLES, LR = 3, 4, 3e-3
LOW, ACCUMULATIONS = ("bf16", "fp16"), (1, 2)
CLIP, ABOVE = 0.5, 50.0  # limits of the norm: each norm is above the first, and below the other


@dataclass(frozen=True)
class Update:
    """What a step does with the gradients. clip: the limit of the norm; None: there is none."""

    optimizer: str
    params: tuple[tuple[str, float], ...]
    clip: float | None = None


ADAM = Update("AdamW", (("lr", LR), ("weight_decay", 0.1)), CLIP)
SGD = Update("SGD", (("lr", 0.05),))
SGD_BELOW_LIMIT = Update("SGD", (("lr", 0.05),), ABOVE)


@dataclass(frozen=True)
class Case:
    """One engine."""

    stage: int
    precision: str
    accumulation: int
    update: Update


def updates_of(precision: str, accumulation: int) -> tuple[Update, ...]:
    sgd = SGD if accumulation == 1 else SGD_BELOW_LIMIT
    return {"fp32": (ADAM, sgd), "bf16": (ADAM,), "fp16": (sgd,)}[precision]


@dataclass(frozen=True)
class Run:
    """A model on so many ranks, at every stage, in fp32 and in each of `low`."""

    feature: str
    world_size: int
    low: tuple[str, ...] = LOW
    accumulations: tuple[int, ...] = ACCUMULATIONS

    @property
    def cases(self) -> list[Case]:
        products = itertools.product((0, 1, 2, 3), ("fp32", *self.low), self.accumulations)
        return [Case(*one, update) for one in products for update in updates_of(*one[1:])]

    @property
    def name(self) -> str:
        more = [*self.low, *map(str, self.accumulations)] if self != Run(self.feature, 2) else []
        return "-".join([self.feature, str(self.world_size), *more])


def config_of(case: Case, world_size: int) -> dict[str, Any]:
    return config(
        case.stage,
        case.precision,
        samples=SAMPLES // world_size,
        accumulation=case.accumulation,
        optimizer=case.update.optimizer,
        params=dict(case.update.params),
        clip=case.update.clip,
    )


def plain_run(feature: str, accumulation: int, world_size: int, update: Update) -> dict[str, Any]:
    """Three steps of plain PyTorch, one process, on the batches of all ranks."""
    model = build(feature)
    steps = plain(
        model,
        STEPS,
        lambda step: [
            (part, rank)
            for micro_step in range(accumulation)
            for rank, part in enumerate(micro_batch(step, micro_step, SAMPLES).chunk(world_size))
        ],
        optimizer=update.optimizer,
        clip=update.clip,
        **dict(update.params),
    )
    losses, norms = map(list, zip(*steps, strict=True))
    return {"losses": losses, "norms": norms, "params": _values(model)}


def _values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("_orig_mod."): param.detach().float().clone()
        for name, param in model.named_parameters()
    }


def engine_run(feature: str, case: Case) -> dict[str, Any]:
    """The same three steps on this rank of an engine."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(feature)
    engine = xds.initialize(model, config_of(case, world_size))
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for micro_step in range(case.accumulation):
            part = micro_batch(step, micro_step, SAMPLES).chunk(world_size)[rank]
            loss = engine(part, rank)
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / case.accumulation
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
        norms.append(engine.get_global_grad_norm())
        assert engine.was_step_applied()
    engine.destroy()
    return {"losses": losses, "norms": norms, "params": _values(model)}


def rank_main(run: Run) -> dict[Case, dict[str, Any]]:
    return {case: engine_run(run.feature, case) for case in run.cases}


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
@pytest.mark.quick("mixed_shapes-2")
def test_every_combination_matches_plain_pytorch(run: Run) -> None:
    results = run_processes(rank_main, run.world_size, run)
    for case in run.cases:
        for other in results[1:]:  # every rank has the same parameters and norms
            check_equal(results[0][case], other[case])
    groups: dict[tuple[str, int, Update], dict[int, dict[str, Any]]] = defaultdict(dict)
    for case in run.cases:
        key = (case.precision, case.accumulation, case.update)
        groups[key][case.stage] = results[0][case]
    for (precision, accumulation, update), by_stage in groups.items():
        wanted = plain_run(run.feature, accumulation, run.world_size, update)
        assert CLIP < min(wanted["norms"]) and max(wanted["norms"]) < ABOVE
        for found in by_stage.values():
            check_against_plain(found, wanted, precision)
        check_stages_equal(by_stage, precision, adds_early=accumulation > 1 and run.world_size > 1)


def check_against_plain(found: dict[str, Any], wanted: dict[str, Any], precision: str) -> None:
    rel = 1e-6 if precision == "fp32" else 2e-2
    assert found["losses"] == pytest.approx(wanted["losses"], rel=rel)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=rel)
    for name, value in wanted["params"].items() if precision == "fp32" else ():
        check_close(name, found["params"][name], value)


def check_stages_equal(by_stage: dict[int, Any], precision: str, *, adds_early: bool) -> None:
    """adds_early: stages 2 and 3 add over ranks before they add over micro-batches."""
    equal = [(0, 1), (2, 3)] if adds_early else [(0, 1, 2, 3)]
    for first, *others in equal:
        if precision != "fp32" and first == 0:
            first, *others = others
        for stage in others:
            check_equal(by_stage[first], by_stage[stage])
