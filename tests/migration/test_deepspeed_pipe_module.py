"""Tests of what DeepSpeed's scripts ask a `PipelineModule` before and after `initialize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from warm_ranks import warm

from xds import deepspeed
from xds.deepspeed.pipe import DualPipeVModule, PipelineModule
from xds.pipe.module import PipelineModule as Core


def layers() -> list[Any]:
    return [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), abs, nn.ReLU(), nn.Linear(2, 2)]


def asked() -> dict[str, Any]:
    model = PipelineModule(layers(), num_stages=2, partition_method="uniform")
    assert isinstance(model, Core) and type(model).__name__ == "PipelineModule"
    model.set_checkpoint_interval(2)
    v = DualPipeVModule(layers(), num_stages=2, partition_method=[0, 1, 2, 3, 6])
    v.set_checkpoint_interval(1)
    found = {
        "parts": model.partitions(),
        "owners": [model.stage_owner(index) for index in range(6)],
        "stages": model.num_pipeline_stages(),
        "rank": (model.global_rank, model.world_size),
        "funcs": [getattr(one, "__name__", type(one).__name__) for one in model.forward_funcs],
        "of v": len(v.forward_funcs),
    }
    for wrong in (lambda: model.stage_owner(6), lambda: model.set_checkpoint_interval(-1)):
        with pytest.raises(AssertionError):
            wrong()
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config["gradient_accumulation_steps"] = 2
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert engine.module.stage_owner(3) == 1
    return found


def test_a_pipeline_module_knows_its_stages() -> None:
    for rank, found in enumerate(warm(2).run(asked)):
        own = (["Linear", "ReLU", "Linear"], ["abs", "ReLU", "Linear"])[rank]
        assert found == {
            "parts": [0, 3, 6],
            "owners": [0, 0, 0, 1, 1, 1],
            "stages": 2,
            "rank": (rank, 2),
            "funcs": own,
            "of v": (4, 2)[rank],
        }


def test_before_the_cut_an_error_says_what_is_needed() -> None:
    model = PipelineModule(layers())
    with pytest.raises(ValueError, match="not cut into stages yet; pass num_stages"):
        model.stage_owner(0)
    assert model.num_pipeline_stages() is None and not dist.is_initialized()
