"""Tests of the engine's names that DeepSpeed reads from its config: values, defaults and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import nn

import xds.deepspeed as deepspeed
from xds.deepspeed.missing import MISSING_INTERNALS, NotCovered
from xds.deepspeed.pipe import PipelineModule
from xds.deepspeed.runtime import utils
from xds.deepspeed.runtime.getters import ANSWERS, ATTRIBUTES, PATHS


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
    for name in (*PATHS, *ANSWERS):
        getattr(engine, name)()
    for name, value in ATTRIBUTES.items():
        assert getattr(engine, name) == value, name
    assert engine.optimizer_name() == "adamw"
    assert engine.zero_reduce_bucket_size() == engine.zero_allgather_bucket_size() == 500_000_000
    assert engine.zero_sub_group_size() == 1_000_000_000
    assert engine.zero_model_persistence_threshold() == 2**63 - 1
    assert engine.postscale_gradients() is True and engine.gradient_predivide_factor() == 1.0
    assert engine.zero_partial_offload() == 1.0 and engine.cpuadam_cores_perc() == 0.9
    assert engine.zero_use_cpu_optimizer() is False and engine.super_offload() is False
    assert engine.dynamic_loss_scale_args()["init_scale"] == 65536
    assert engine.communication_data_type == torch.float32
    assert engine.aio_config()["queue_depth"] == 8 and engine.autotp_size() == 0
    assert len(engine.torch_autocast_lower_precision_safe_modules()) == 4
    assert engine.dist_backend == "gloo" and engine.pipeline_parallelism is False
    assert engine.sequence_parallel_size == 1 and engine.seq_dp_world_size == 1
    assert list(engine.param_names.values()) == ["weight", "bias"]
    assert engine.collate_fn is None and engine.inside_no_sync_ctxt is False
    assert (
        engine.checkpoint_tag_validation_enabled() and not engine.checkpoint_tag_validation_fail()
    )
    assert engine.save_zero_checkpoint and engine.save_non_zero_checkpoint
    one, two = engine.unflatten(
        engine.flatten([torch.ones(2), torch.zeros(3)]), [torch.ones(2), torch.ones(3)]
    )
    assert one.tolist() == [1, 1] and two.tolist() == [0, 0, 0]
    engine.autotuning_metric_path(), engine.autotuning_model_info_path(), engine.collect_python_gc()


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
    engine.warn_unscaled_loss = False
    assert engine.warn_unscaled_loss is False


def refused() -> None:
    engine = start()
    for name in MISSING_INTERNALS:
        assert not hasattr(engine, name), name
    with pytest.raises(
        NotCovered, match=r"engine\.clip_fp32_gradients is not covered .* gradient_clipping"
    ):
        engine.clip_fp32_gradients()


@pytest.mark.parametrize("check", [defaults, given_values, refused])
def test_names_of_the_engine(check: Any) -> None:
    run_ranks(check, 1)


def test_small_functions_of_runtime_utils(capsys: pytest.CaptureFixture[str]) -> None:
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
    padded = utils.align_dense_tensors(list(weights), 4)
    assert [one.numel() for one in padded] == [3, 4, 1]
    assert utils.align_dense_tensors(padded, 4) is padded
    assert utils.get_inactive_params(weights) == []
    assert utils.DummyOptim(weights).param_groups == [{"params": weights}]
    assert utils.get_ma_status() > 0 and utils.torch_memory_reserved() > 0
    assert bool(utils.CheckOverflow._has_inf_or_nan(torch.tensor([float("inf")]), 0))
    utils.memory_status("here")
    assert capsys.readouterr().out.startswith("RANK=0 MEMSTATS here ")


def stage_before_initialize() -> None:
    layers = [nn.Linear(4, 4) for _ in range(8)]
    model = PipelineModule(layers, num_stages=2)
    rank = torch.distributed.get_rank()
    assert model.stage_id == rank and model.parts == [0, 4, 8]
    assert (model._local_start, model._local_stop) == (4 * rank, 4 * rank + 4)


def test_a_pipeline_module_knows_its_stage_before_initialize() -> None:
    run_ranks(stage_before_initialize, 2)
