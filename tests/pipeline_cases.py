"""Test helper: cases of training in pipeline stages: cut, ZeRO stage, schedule, precision, model, and runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from helpers import run_ranks
from pipeline_runs import Model, batches, config_of, worst
from torch import Tensor, nn

import xds

STEPS, COUNT, BLOCKS = 5, 8, 8
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}
KINDS = ("plain", "tied", "frozen_first", "frozen_last", "checkpointed", "clipped")
CLIP = 0.5
TOLERANCES = {"fp32": 1e-6, "bf16": 5e-3, "fp16": 1e-3}


@dataclass(frozen=True)
class Case:
    """How a model is trained. `pipe` = 1: without a pipeline."""

    pipe: int
    data: int
    stage: int
    schedule: str = "1f1b"
    precision: str = "fp32"
    kind: str = "plain"

    @property
    def world_size(self) -> int:
        return self.pipe * self.data

    @property
    def name(self) -> str:
        return (
            f"{self.pipe}x{self.data}-zero{self.stage}-{self.schedule}-{self.precision}-{self.kind}"
        )

    @property
    def is_exact(self) -> bool:
        """Its masters are bit-equal to those without a pipeline."""
        one_order = self.schedule == "1f1b" and self.stage <= 1
        # what stages share is sent, so in 16 bits it is rounded once more
        sends_more = self.precision != "fp32" and self.kind != "frozen_first"
        return one_order and not sends_more and self.kind not in ("tied", "clipped")

    def config(self) -> dict[str, Any]:
        changes = dict(PRECISIONS[self.precision])
        if self.kind == "clipped":
            changes["gradient_clipping"] = CLIP
        if self.kind == "checkpointed":
            changes["activation_checkpointing"] = {"enabled": True}
        zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1}
        pipeline = {"schedule": self.schedule} if self.pipe > 1 else {}
        return config_of(self.pipe, COUNT, zero=zero, pipeline=pipeline, **changes)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = Model(BLOCKS, tied=self.kind == "tied")
        part = BLOCKS // 4 + 1  # more than a stage of four
        if self.kind == "frozen_first":
            freeze = [model.embed, *model.blocks[:part]]
            model.position.requires_grad_(False)
        elif self.kind == "frozen_last":
            freeze = [*model.blocks[-part:], model.norm, model.head]
        else:
            freeze = []
        for module in freeze:
            module.requires_grad_(False)
        return model


@dataclass(frozen=True)
class Result:
    """Loss and norm of each step, and the masters after the last one that this rank knows."""

    steps: list[tuple[float, float]]
    masters: dict[str, Tensor]

    def unequal(self, other: Result) -> list[str]:
        """Names of the masters of both that are not bit-equal."""
        names = sorted({*self.masters} & {*other.masters})
        return [n for n in names if not torch.equal(self.masters[n], other.masters[n])]


def run(case: Case) -> Result:
    """On each rank of warm ranks."""
    engine = xds.initialize(case.model(), case.config())
    found = []
    for step in range(STEPS):
        loss = engine.train_batch(iter(batches(step, engine.dp_rank, COUNT)))
        found.append((loss.item(), engine.get_global_grad_norm() or 0.0))
    masters = engine.full_state_dict(rank0_only=False, full_precision=True)
    engine.destroy()
    return Result(found, masters)


@cache
def without_pipeline(case: Case) -> Result:
    """The same data ranks, ZeRO stage and precision, without a pipeline."""
    plain = replace(case, pipe=1, schedule="1f1b")
    result: Result = run_ranks(run, case.data, plain)[0]
    return result


@cache
def one_process(data: int, kind: str) -> list[tuple[float, float]]:
    """Loss and norm of each step of torch alone, fp32."""
    model = Case(1, data, 0, kind=kind).model()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.01)
    found = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(data):
            for batch in batches(step, rank, COUNT):
                loss = model(*batch) / (COUNT * data)
                loss.backward()
                total += loss.item()
        limit = CLIP if kind == "clipped" else float("inf")
        norm = nn.utils.clip_grad_norm_(params, limit)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm.item()))
    return found


def faults(case: Case) -> list[str]:
    """What is wrong with the numbers of a case, on any of its ranks."""
    return examine(case)[1]


def examine(case: Case) -> tuple[float, list[str]]:
    """The largest relative difference of loss and norm, and what is wrong."""
    results: list[Result] = run_ranks(run, case.world_size, case)
    first = results[0]
    found = []
    if any(result.steps != first.steps for result in results):
        found.append("ranks have different losses or norms")
    plain = without_pipeline(replace(case, pipe=1, schedule="1f1b"))
    expected = one_process(case.data, case.kind) if case.precision == "fp32" else plain.steps
    difference = worst(first.steps, expected)
    if not difference <= TOLERANCES[case.precision]:
        found.append(f"loss or norm differs by {difference:.1e}")
    if {name for result in results for name in result.masters} != {*plain.masters}:
        found.append("ranks have other parameters than without a pipeline")
    for rank, result in enumerate(results):
        if any(result.unequal(other) for other in results[:rank]):
            found.append(f"rank {rank} has other masters than ranks before it")
        if case.is_exact and (names := result.unequal(plain)):
            found.append(f"masters differ from those without a pipeline: {names}")
    return difference, found
