"""Runs whose updates are rounded, with the same batch on every rank: a mean over 1, 2 or 4 is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from models import build, micro_batch
from torch import Tensor

import xds

STEPS, SEED, DECAY = 4, 3, 0.1
EPS = 1e-2  # Adam with a small one does not show a factor on all gradients
CPU = {"offload_optimizer": {"device": "cpu"}}
GUESS = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
Given = Callable[
    [int, dict[str, Any] | None], dict[str, Any]
]  # of a stage, and keys of zero_optimization


def trained(
    case: dict[str, Any], folder: str, *, resumes_at: int = 0, masters: bool = False
) -> dict[str, Tensor]:
    """The parameters, or their masters, after STEPS steps."""
    engine = xds.initialize(build("tied"), case)
    for step in range(STEPS):
        if resumes_at and step == resumes_at:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = xds.initialize(build("tied"), case)
            engine.load_checkpoint(folder)
        engine.backward(engine(micro_batch(step, 0)))
        engine.step()
    found = engine.full_state_dict(rank0_only=False, full_precision=masters)
    engine.destroy()
    return found


def of_world(given: Given, folder: str, masters: bool = False) -> dict[str, dict[str, Tensor]]:
    """The parameters, or their masters, by case: every stage, a resume, and each place of states."""
    world = dist.get_world_size()
    cases: dict[str, tuple[dict[str, Any], int]] = {
        f"stage {stage}": (given(stage, None), 0) for stage in (0, 1, 2, 3)
    }
    cases["resumed"] = given(2 if world == 2 else 3, None), 2
    cases["on the host"] = given(2, CPU), 0
    cases["undone"] = given(2, GUESS), 0
    if world == 2:
        disk = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
        cases["on a disk"] = given(3, disk), 2
    return {
        name: trained(case, f"{folder}/{name}", resumes_at=at, masters=masters)
        for name, (case, at) in cases.items()
    }
