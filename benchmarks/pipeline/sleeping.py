"""Layers that sleep instead of computing, and the times of pipeline steps that are made of them.

    layer of stage s   forward: 20 ms   gradient of the input: 20 ms   gradient of the weight: 20 ms

Sleeping stages need no processor, so more ranks than cores show what the schedule and the messages cost.
The time of a layer contains its own linear layer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import xds
from xds.pipe import weight_grads
from xds.pipe.module import PipelineModule
from xds.pipe.schedules.build import build_table
from xds.pipe.schedules.simulation import Costs, simulate

WIDTH = 8
LOOP_SECONDS = 0.0003
TORCH = "torch's 1f1b"
SPLIT = ("zero_bubble", "zbv", "dualpipev")  # schedules that compute weight gradients apart


@dataclass(frozen=True)
class Case:
    """A schedule over `ranks` ranks with `count` micro-batches, and how many steps are timed."""

    schedule: str
    ranks: int
    count: int
    steps: int = 3
    seconds: float = 0.020  # of each third of a rank's work on a micro-batch

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return 2 if self.schedule in ("interleaved_1f1b", "zbv", "dualpipev") else 1

    @property
    def work_seconds(self) -> float:
        """What each rank sleeps in a step."""
        return 3 * self.seconds * self.count

    @property
    def simulated_bubble(self) -> float:
        """The share of the step in which a rank waits, if messages take no time."""
        return 1 - self.work_seconds / self._simulation.makespan_seconds

    @property
    def simulated_in_flight(self) -> list[int]:
        """For each rank: the most micro-batches between forward and backward."""
        return [self._simulation.peak_in_flight(rank) for rank in range(self.ranks)]

    @property
    def _simulation(self) -> Any:
        chunks = self.chunks if self.chunks > 1 else 0
        schedule = "1f1b" if self.schedule == TORCH else self.schedule
        table = build_table(schedule, self.ranks, self.count, chunks)
        return simulate(table, Costs(*(self.seconds / self.chunks,) * 3))


def sleep_until(end: float) -> None:
    """Sleep until exactly `end`: the last bit is a loop, because time.sleep wakes up late."""
    time.sleep(max(0.0, end - LOOP_SECONDS - time.perf_counter()))
    while time.perf_counter() < end:
        pass


class _Begin(torch.autograd.Function):
    """Before the linear layer: its backward ends the stage's gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SleepingLayer) -> Tensor:
        ctx.layer = layer
        layer.begun_at = time.perf_counter()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        sleep_until(ctx.layer.begun_at + ctx.layer.backward_seconds)
        return grad, None


class _End(torch.autograd.Function):
    """After the linear layer: its backward begins the stage's gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SleepingLayer) -> Tensor:
        ctx.layer = layer
        sleep_until(layer.begun_at + layer.forward_seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.layer.begun_at = time.perf_counter()
        return grad, None


class SleepingLayer(nn.Module):
    """A linear layer [n, WIDTH] -> [n, WIDTH] that sleeps for the rest of its time."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.forward_seconds, self.backward_seconds = forward, backward
        self.begun_at = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """The input requires a gradient, so that backward sleeps on the first stage as well."""
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()
        x = _Begin.apply(x, self)  # type: ignore[no-untyped-call]
        return _End.apply(self.linear(x), self)  # type: ignore[no-any-return, no-untyped-call]


def _sleep_in_weight_gradients(seconds: float) -> None:
    """Let each weight gradient that can be computed apart take `seconds`."""
    compute = vars(weight_grads).setdefault("_before_sleeping", weight_grads._weight_grad)

    def sleeping(entry: Any) -> Tensor:
        end = time.perf_counter() + seconds
        grad = compute(entry)
        sleep_until(end)
        return grad  # type: ignore[no-any-return]

    weight_grads._weight_grad = sleeping


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def make_engine(case: Case) -> Any:
    """An engine whose stages sleep."""
    part = case.seconds / case.chunks
    is_split = case.schedule in SPLIT
    _sleep_in_weight_gradients(part)
    backward = part if is_split else 2 * part
    layers = [SleepingLayer(part, backward) for _ in range(case.ranks * case.chunks)]
    model = PipelineModule(layers, loss_fn=_squares, partition_method="uniform")
    section: dict[str, Any] = {"stages": case.ranks, "schedule": case.schedule}
    if case.chunks > 1:
        section["chunks"] = case.chunks
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.count,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "pipeline": section,
    }
    return xds.initialize(model, config)


def time_case(rank: int, case: Case) -> dict[str, Any]:
    """Seconds of each whole step and of its table on this rank; the first step, with the headers, apart."""
    engine = make_engine(case)
    executor = engine._batches._executor
    run, table_seconds = executor.run, []

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        outcome = run(*args, **kwargs)
        table_seconds.append(time.perf_counter() - start)
        return outcome

    executor.run = timed
    batch = torch.ones(1, WIDTH), torch.zeros(1, WIDTH)
    whole_seconds = []
    for _ in range(1 + case.steps):
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch(iter([batch] * case.count))
        whole_seconds.append(time.perf_counter() - start)
    in_flight = executor.max_in_flight
    engine.destroy()
    return {
        "rank": rank,
        "first": whole_seconds[0],
        "whole": whole_seconds[1:],
        "table": table_seconds[1:],
        "in_flight": in_flight,
    }


def time_torch(rank: int, case: Case) -> dict[str, Any]:
    """The same of torch's 1F1B with the same layers; its first step finds the shapes."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    _sleep_in_weight_gradients(0.0)
    stage = PipelineStage(
        SleepingLayer(case.seconds, 2 * case.seconds), rank, case.ranks, torch.device("cpu")
    )
    schedule = Schedule1F1B(stage, case.count, loss_fn=_squares)
    inputs, targets = torch.ones(case.count, WIDTH), torch.zeros(case.count, WIDTH)
    seconds = []
    for _ in range(1 + case.steps):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            schedule.step(inputs)
        elif rank == case.ranks - 1:
            schedule.step(target=targets, losses=[], return_outputs=False)
        else:
            schedule.step()
        seconds.append(time.perf_counter() - start)
    return {"rank": rank, "whole": seconds[1:], "table": seconds[1:], "in_flight": None}


def time_cases(rank: int, _: int, cases: list[Case]) -> list[dict[str, Any]]:
    """This rank's figures of every case, one after the other."""
    return [(time_torch if case.schedule == TORCH else time_case)(rank, case) for case in cases]


__all__ = ["SPLIT", "TORCH", "Case", "SleepingLayer", "make_engine", "time_case", "time_cases"]
