"""Test helper: engines that save into folders of their nodes."""

from __future__ import annotations

import os
from typing import Any

import torch
from saved_checkpoints import Net, moments

import xds


def engine_of(stage: int, *, is_local: bool = True, **section: Any) -> Any:
    torch.manual_seed(stage)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "unit_min_numel": 0},
        "checkpoint": {"use_node_local_storage": is_local, **section},
    }
    return xds.initialize(Net(), config)


def folder_of(base: str, per_node: int) -> str:
    """The folder of this rank's node."""
    return f"{base}/node{int(os.environ['RANK']) // per_node}"


def values_of(engine: Any) -> tuple[Any, Any, Any]:
    weights = engine.full_state_dict(rank0_only=False, full_precision=True)
    return weights, moments(engine), torch.get_rng_state()


def same(one: Any, two: Any) -> bool:
    weights = all(torch.equal(value, two[0][name]) for name, value in one[0].items())
    states = all(torch.equal(value, two[1][name]) for name, value in one[1].items())
    return weights and states and torch.equal(one[2], two[2])
