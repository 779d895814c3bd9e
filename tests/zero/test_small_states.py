"""Optimizer states of fewer bits than fp32 have the same bits at every stage and place, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import build, micro_batch
from runs import config
from torch import Tensor

import xds
from xds.ops.kernels.adam import adam_
from xds.ops.libraries import load
from xds.ops.rounding import draw_rows

STEPS, SEED, DECAY = 4, 3, 0.1
BF16 = {"bf16": {"enabled": True, "rounding_seed": SEED}}
NARROW = {"bf16": {**BF16["bf16"], "bf16_master_weights_and_grads": True}}
FP32: dict[str, Any] = {}
CPU = {"offload_optimizer": {"device": "cpu"}}
GUESS = {"offload_optimizer": {"device": "cpu", "super_offload": True}}


def given(
    stage: int, states: str, half: dict[str, Any], zero: dict[str, Any] | None = None
) -> dict[str, Any]:
    params = {"weight_decay": DECAY, "state_dtype": states}
    return config(stage, samples=4, zero=zero, params=params, **half)


def trained(case: dict[str, Any], folder: str, *, resumes_at: int = 0) -> dict[str, Tensor]:
    """The parameters after STEPS steps, with the same batch on every rank: their mean is exact."""
    engine = xds.initialize(build("tied"), case)
    for step in range(STEPS):
        if resumes_at and step == resumes_at:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = xds.initialize(build("tied"), case)
            engine.load_checkpoint(folder)
        engine.backward(engine(micro_batch(step, 0)))
        engine.step()
    found = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return found


def new_states(states: str, numel: int) -> list[Tensor]:
    dtype = {"bf16": torch.bfloat16}[states]
    return [torch.zeros(numel, dtype=dtype) for _ in range(2)]


def in_a_loop(states: str, half: dict[str, Any]) -> dict[str, Tensor]:
    """The same by autograd and one call of the kernel for each parameter."""
    load("cpu")
    is_bf16, is_narrow = bool(half), half is NARROW
    seed = SEED if half else 0
    model = build("tied").to(torch.bfloat16 if is_bf16 else torch.float32)
    params = dict(model.named_parameters())
    masters = {name: param.data.reshape(-1).float() for name, param in params.items()}
    moments = {name: new_states(states, param.numel()) for name, param in params.items()}
    for step in range(STEPS):
        model(micro_batch(step, 0)).backward()
        for name, param in params.items():
            flat, grad = param.data.view(-1), param.grad
            assert grad is not None
            master = masters[name] if is_bf16 and not is_narrow else flat
            adam_(
                *(master, grad.reshape(-1), *moments[name], None if master is flat else flat),
                *(torch.tensor(step + 1.0), None, None),
                *(1e-2, 0.9, 0.999, 1e-8, DECAY, True, True),
                draws=draw_rows([(0, flat.numel(), 0, name)], seed),
            )
            param.grad = None
    return {name: param.data for name, param in params.items()}


def of_world(states: str, half: dict[str, Any], folder: str) -> dict[str, Any]:
    world = dist.get_world_size()
    cases: dict[str, tuple[Any, ...]] = {
        f"stage {stage}": (given(stage, states, half), 0) for stage in (0, 1, 2, 3)
    }
    cases["resumed"] = given(2 if world == 2 else 3, states, half), 2
    cases["on the host"] = given(2, states, half, CPU), 0
    cases["undone"] = given(2, states, half, GUESS), 0
    if world == 2:
        disk = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
        cases["on a disk"] = given(3, states, half, disk), 2
    return {
        name: trained(case, f"{folder}/{name}", resumes_at=at) for name, (case, at) in cases.items()
    }


@pytest.mark.parametrize(
    ("states", "half", "world"),
    [("bf16", BF16, 1), ("bf16", BF16, 2), ("bf16", FP32, 4)],
)
def test_ranks_stages_places_and_resumes_change_no_bit(
    states: str, half: dict[str, Any], world: int, tmp_path: Path
) -> None:
    wanted = in_a_loop(states, half)
    for per_rank in run_ranks(of_world, world, states, half, str(tmp_path)):
        for name, found in per_rank.items():
            for key, value in wanted.items():
                same = found[key].reshape(-1).to(value.dtype)
                assert torch.equal(same, value.reshape(-1)), (name, key)
