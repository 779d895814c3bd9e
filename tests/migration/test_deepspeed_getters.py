"""Tests of the engine's names that DeepSpeed reads from its config: values, defaults and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import run_processes
from torch import nn

import xds.deepspeed as deepspeed
from xds.deepspeed.pipe import PipelineModule
from xds.engine.deepspeed.missing import MISSING_METHODS, NotCovered
from xds.engine.deepspeed.training.values import _ANSWERS, _ATTRIBUTES, _CHECKED, _GIVEN


def start(stage: int = 2, zero: dict[str, Any] | None = None, **more: Any) -> Any:
    model = nn.Linear(4, 2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, **(zero or {})},
        **more,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def defaults() -> None:
    engine = start()
    for name in (*_CHECKED, *_GIVEN, *_ANSWERS):
        getattr(engine, name)()
    for name, value in _ATTRIBUTES.items():
        assert getattr(engine, name) == value, name
    assert engine.optimizer_name() == "adamw"
    assert engine.zero_reduce_bucket_size() == engine.zero_allgather_bucket_size() == 500_000_000
    assert engine.zero_sub_group_size() == 1_000_000_000
    assert engine.postscale_gradients() is True and engine.gradient_predivide_factor() == 1.0
    assert engine.zero_use_cpu_optimizer() is False
    assert engine.dynamic_loss_scale_args()["init_scale"] == 65536
    assert engine.communication_data_type == torch.float32
    assert engine.dist_backend == "gloo" and engine.pipeline_parallelism is False
    assert list(engine.param_names.values()) == ["weight", "bias"]
    assert engine.collate_fn is None and engine.inside_no_sync_ctxt is False
    assert (
        engine.checkpoint_tag_validation_enabled() and not engine.checkpoint_tag_validation_fail()
    )


def given_values() -> None:
    zero = {
        "reduce_bucket_size": 1000,
        "offload_optimizer": {"device": "cpu"},
        "sub_group_size": 77,
    }
    engine = start(3, zero, bf16={"enabled": True}, checkpoint={"tag_validation": "Fail"})
    assert engine.zero_reduce_bucket_size() == 1000 and engine.zero_sub_group_size() == 77
    assert engine.zero_use_cpu_optimizer() is True
    assert engine.communication_data_type == torch.bfloat16
    assert engine.checkpoint_tag_validation_fail() is True
    engine.losses = 3
    assert engine.losses == 3


def refused() -> None:
    engine = start()
    for name in MISSING_METHODS:
        assert not hasattr(engine, name), name
    with pytest.raises(
        NotCovered, match=r"engine\.clip_fp32_gradients is not covered .* gradient_clipping"
    ):
        engine.clip_fp32_gradients()


@pytest.mark.parametrize("check", [defaults, given_values, refused])
def test_names_of_the_engine(check: Any) -> None:
    run_processes(check, 1)


def stage_before_initialize() -> None:
    layers = [nn.Linear(4, 4) for _ in range(8)]
    model = PipelineModule(layers, num_stages=2)
    rank = torch.distributed.get_rank()
    assert model.stage_id == rank and model.parts == [0, 4, 8]
    assert (model._local_start, model._local_stop) == (4 * rank, 4 * rank + 4)


def test_a_pipeline_module_knows_its_stage_before_initialize() -> None:
    run_processes(stage_before_initialize, 2)
