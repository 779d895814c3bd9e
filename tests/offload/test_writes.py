"""Tests: what user code writes to parameters counts with offload as it does without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from offload_runs import CPU, GUESS, PARAMS, config_of, nvme
from torch import nn

import xds

WIDTH, STEPS = 12, 4
ALL = {**CPU, **PARAMS}
ALL_EARLY = {**GUESS, **PARAMS}
Write = Callable[[nn.Module, int], None]


def clip_and_read_one(model: nn.Module, step: int) -> None:
    """All weights are clipped in place, then one of them is read by name."""
    params = list(model.parameters())
    if step == 1:
        with torch.no_grad():
            for param in params:
                param.clamp_(-0.05, 0.05)
        xds.zero.get_full_param(params[-1])


def clip_and_set_one(model: nn.Module, step: int) -> None:
    """All weights are clipped in place, then one of them is set by name."""
    clip_and_read_one(model, step)
    if step == 1:
        param = next(model.parameters())
        xds.zero.set_full_param(param, torch.full_like(param, 0.25))


def assign_and_read_one(model: nn.Module, step: int) -> None:
    """New tensors are assigned to `.data`, then one of them is read by name."""
    params = list(model.parameters())
    if step == 1:
        for param in params:
            param.data = torch.full_like(param, 0.01)
        xds.zero.get_full_param(params[-1])


def write_while_frozen(model: nn.Module, step: int) -> None:
    """A weight is frozen for a step, and written in the meantime."""
    first = model[0].weight  # type: ignore[index]
    first.requires_grad_(step not in (1, 2))
    if step == 1:
        with xds.zero.GatheredParameters([first], modifier_rank=0), torch.no_grad():
            first.mul_(0.5)


def write_in_forward_while_frozen(model: nn.Module, step: int) -> None:
    """The same inside of forward."""
    first = model[0]  # type: ignore[index]
    first.weight.requires_grad_(step not in (1, 2))
    if step == 0:
        done: list[int] = []

        def halve(*_: Any) -> None:
            if not first.weight.requires_grad and not done:
                done.append(1)
                with torch.no_grad():
                    first.weight.mul_(0.5)

        first.register_forward_pre_hook(halve)


def values_of(
    stage: int, precision: str, offload: dict[str, Any] | None, write: Write, persistence: int
) -> list[torch.Tensor]:
    """The masters after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    config = config_of(stage, precision, 1, offload, "AdamW")
    config["zero_optimization"] |= {
        "unit_min_numel": 10**6,
        "stage3_param_persistence_threshold": persistence,
    }
    engine = xds.initialize(model, config)
    x = torch.full((2, WIDTH), 0.3 + dist.get_rank()).to(next(model.parameters()).dtype)
    found: list[torch.Tensor] = []
    for step in range(STEPS):
        engine.backward(engine(x).float().square().mean())
        engine.step()
        write(model, step)
        if step != 1:  # the values that are read would hide what is lost
            found += [xds.zero.get_full_param(p).clone() for p in model.parameters()]
    engine.destroy()
    return found


BETWEEN = (clip_and_read_one, clip_and_set_one, assign_and_read_one)
FROZEN = (write_while_frozen, write_in_forward_while_frozen)
KEPT = 10**6  # parameters stay gathered between steps


@pytest.mark.parametrize(
    ("size", "stage", "precision", "persistence", "writes"),
    [(1, 2, "bf16", KEPT, BETWEEN), (2, 3, "bf16", KEPT, BETWEEN), (2, 3, "bf16", 0, FROZEN)],
)
@pytest.mark.quick("1-2-bf16-1000000-writes0")
def test_writes_count_as_without_offload(
    tmp_path: Path, size: int, stage: int, precision: str, persistence: int, writes: Any
) -> None:
    offloads = [CPU, GUESS, nvme(tmp_path)]
    if persistence == 0:
        offloads = [ALL, ALL_EARLY, nvme(tmp_path) | PARAMS]
    for write in writes:
        want = run_ranks(values_of, size, stage, precision, None, write, persistence)
        for offload in offloads:
            got = run_ranks(values_of, size, stage, precision, offload, write, persistence)
            for one, other in zip(want, got, strict=True):
                assert all(map(torch.equal, one, other)), (write.__name__, offload)
