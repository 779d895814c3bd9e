"""Tests of gradients in `xds.deepspeed`: one rank's own, before they are summed, and the optimizer's lists."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from torch import Tensor, nn

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed.utils import safe_get_full_grad
from xds.engine.deepspeed.params import zero


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))


def engine_of(stage: int, precision: str = "fp32", **options: Any) -> Any:
    model = build()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        precision: {"enabled": True},
        **options,
    }
    if precision == "fp32":
        del config["fp32"]
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def batch_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((1, 5), rank + 1.0, dtype=dtype)


def plain_grads(ranks: list[int], factor: float) -> list[Tensor]:
    """The gradients of the mean of these ranks' losses, times `factor`."""
    model = build()
    for rank in ranks:
        (model(batch_of(rank)).sum() * factor / len(ranks)).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def check(engine: Any, expected: list[Tensor]) -> None:
    for param, other in zip(engine.module.parameters(), expected, strict=True):
        found = safe_get_full_grad(param)
        assert found is not None and found.dtype == torch.float32
        torch.testing.assert_close(found, other, rtol=3e-2, atol=1e-2)


def own_gradients(stage: int, precision: str, op: str) -> None:
    rank = dist.get_rank()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    engine = engine_of(stage, precision, gradient_accumulation_steps=2, gradient_allreduce_op=op)
    with engine.no_sync():
        engine.backward(engine(batch_of(rank, dtype)).sum())
        check(engine, plain_grads([rank], 0.5))
        engine.backward(engine(batch_of(rank, dtype)).sum())
        check(engine, plain_grads([rank], 1.0))
    engine.zero_grad()
    engine.backward(engine(batch_of(rank, dtype)).sum())
    check(engine, plain_grads([rank], 0.5))  # not the last of the step
    engine.step()
    engine.backward(engine(batch_of(rank, dtype)).sum())
    check(engine, plain_grads([0, 1], 1.0 if op == "mean" else 2.0))
    with pytest.raises(AssertionError, match="scalar tensor"):
        engine.scale(torch.ones(2, 2, requires_grad=True))
    engine.step()
    engine.destroy()


def own_gradients_everywhere() -> None:
    for stage, precision, op in ((0, "bf16", "sum"), (0, "fp32", "mean"), (1, "bf16", "mean")):
        own_gradients(stage, precision, op)


def test_a_gradient_that_is_not_summed_yet_is_the_ranks_own() -> None:
    run_processes(own_gradients_everywhere, 2)


def test_clipping_needs_the_norm_that_a_config_leaves_out() -> None:
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "compute_grad_norm": False},
    }
    with pytest.raises(xds.ConfigError, match="requires gradient_clipping=0"):
        xds.Config.load(config)
    config["zero_optimization"] = {
        "stage": 3,
        "compute_grad_norm": False,
    }  # DeepSpeed ignores it there
    assert xds.Config.load(config).zero_optimization.shows_grad_norm


def one_of_several() -> None:
    os.environ["WORLD_SIZE"] = "8"
    with pytest.raises(ValueError, match="WORLD_SIZE=8.*init_distributed"):
        zero.Init()
    zero.Init(data_parallel_group=dist.group.WORLD)
    os.environ["WORLD_SIZE"] = "1"
    zero.Init()


def test_one_rank_is_not_the_whole_model_where_the_launcher_started_several() -> None:
    run_processes(one_of_several, 1)
