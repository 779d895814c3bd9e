"""Tests of gradients in `xds.deepspeed`: one rank's own, before they are summed, and the optimizer's lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from torch import Tensor, nn

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed.runtime.zero import partition_parameters, stage_1_and_2
from xds.deepspeed.runtime.zero.refused import check_zero
from xds.deepspeed.runtime.zero.utils import ZeRORuntimeException
from xds.deepspeed.utils import safe_get_full_grad


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
    run_ranks(own_gradients_everywhere, 2)


def lists_of_gradients(stage: int, offloads: bool) -> None:
    """Two micro-batches a step; the sums of squares of the lists against plain PyTorch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = engine_of(
        stage,
        gradient_accumulation_steps=2,
        gradient_clipping=0.0,
        zero_optimization={
            "stage": stage,
            "compute_grad_norm": offloads,
            "offload_optimizer": {"device": "cpu"} if offloads else None,
        },
    )
    optimizer = engine.optimizer
    assert not optimizer.averaged_gradients and not optimizer.accumulated_grads_in_cpu
    for _ in range(2):
        engine.backward(engine(batch_of(rank)).sum())
        assert len(optimizer.accumulated_grads_in_cpu) == (4 if offloads else 0)
        lists = optimizer.averaged_gradients
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    square = torch.stack([part.square().sum() for parts in lists.values() for part in parts]).sum()
    dist.all_reduce(square)
    expected = sum(grad.square().sum() for grad in plain_grads(list(range(world)), 1.0))
    torch.testing.assert_close(square, expected)
    if world == 1:  # they are the engine's own
        next(iter(lists.values()))[0][0] = float("nan")
    before = [param.detach().clone() for param in engine.module.parameters()]
    if world == 1:
        with pytest.raises(xds.XdsError, match="gradient norm"):  # fp32 does not skip steps
            engine.step()
        assert optimizer.overflow
    else:
        engine.step()
    if not offloads:
        assert engine.get_global_grad_norm() is None and optimizer._global_grad_norm is None
    same = [torch.equal(*two) for two in zip(before, engine.module.parameters(), strict=True)]
    assert all(same) == (world == 1)
    assert not optimizer.averaged_gradients
    engine.destroy()


def lists_everywhere() -> None:
    for stage, offloads in ((1, False), (2, False), (2, True)):
        lists_of_gradients(stage, offloads)


@pytest.mark.parametrize("world", [1, 2])
def test_the_optimizer_lists_gradients_between_backward_and_step(world: int) -> None:
    run_ranks(lists_everywhere, world)


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


@pytest.mark.parametrize(
    ("keys", "zero", "why"),
    [
        (
            {},
            {"compute_grad_norm": False, "offload_optimizer": {"device": "cpu"}},
            "optimizer offload",
        ),
        ({}, {"allgather_bucket_size": 1001}, "must be a multiple of nccl_start_alignment_factor"),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            {"compute_grad_norm": False},
            "BF16 parameters and FP32 gradient accumulation",
        ),
        (
            {"zero_force_ds_cpu_optimizer": True},
            {"offload_optimizer": {"device": "cpu"}},
            "an optimizer of the script, Adam",
        ),
    ],
)
def test_what_deepspeed_refuses_is_refused(
    keys: dict[str, Any], zero: dict[str, Any], why: str
) -> None:
    optimizer = torch.optim.Adam(build().parameters())
    config = {"zero_optimization": {"stage": 1, **zero}, **keys}
    with pytest.raises(ZeRORuntimeException, match=why):
        check_zero(config, optimizer)
    check_zero({"zero_optimization": {"stage": 3, "allgather_bucket_size": 1001}}, optimizer)


def test_gradients_are_unscaled_and_clipped_in_place() -> None:
    class Borrower:
        loss_scale, clip_grad = 4.0, 0.0
        unscale_and_clip_grads = stage_1_and_2.DeepSpeedZeroOptimizer.unscale_and_clip_grads

    borrower, grad = Borrower(), torch.full((4,), 8.0)  # its norm is 16 with the scale, 4 without
    borrower.unscale_and_clip_grads([grad], torch.tensor(16.0))
    assert grad.tolist() == [2.0] * 4
    borrower.loss_scale, borrower.clip_grad = 1.0, 2.0
    borrower.unscale_and_clip_grads([[grad]], torch.tensor(4.0))
    torch.testing.assert_close(grad, torch.ones(4))
    borrower.unscale_and_clip_grads([grad], torch.tensor(-1.0))  # no norm
    assert not grad.any()


def test_one_rank_is_not_the_whole_model_where_the_launcher_started_several() -> None:
    why = partition_parameters._contradicting_single_rank_pg_error
    found = why(1, None, {"WORLD_SIZE": "8"})
    assert found is not None and "WORLD_SIZE=8" in found and "init_distributed" in found
    for ranks, group, size in ((8, None, "8"), (1, object(), "8"), (1, None, "1"), (1, None, "x")):
        assert why(ranks, group, {"WORLD_SIZE": size}) is None


def unwrapped() -> None:
    engine = engine_of(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    weight = engine.module[0].weight
    with deepspeed.runtime.zero.unwrap_model_for_generation(engine) as inside:
        assert inside is engine and weight.isfinite().all() and weight.shape == (3, 5)
        assert weight.ds_status.name == "AVAILABLE"
    assert weight.ds_status.name == "NOT_AVAILABLE"
    handle = partition_parameters.MultipleAllGatherHandles([weight.all_gather_coalesced([weight])])
    handle.wait(handle_dependency=False)
    assert weight.ds_status.name == "AVAILABLE"
    weight.partition()
    engine.destroy()


def test_a_model_is_whole_while_it_is_unwrapped() -> None:
    run_ranks(unwrapped, 2)
