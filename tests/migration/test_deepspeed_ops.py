"""Tests of DeepSpeed's optimizer classes outside an engine, and of its builders of native ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xds
from xds.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from xds.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from xds.deepspeed.ops.lamb import FusedLamb
from xds.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from xds.ops.optim.adam import Adam

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
PAIRS: dict[str, tuple[Make, Make]] = {
    "DeepSpeedCPUAdam": (
        DeepSpeedCPUAdam,
        lambda params: torch.optim.AdamW(params, weight_decay=0.0),
    ),
    "FusedAdam L2": (
        lambda params: FusedAdam(params, 1e-2, adam_w_mode=False, weight_decay=0.1),
        lambda params: torch.optim.Adam(params, 1e-2, weight_decay=0.1),
    ),
    "DeepSpeedCPUAdagrad": (DeepSpeedCPUAdagrad, torch.optim.Adagrad),
}


def trained(make: Make, start: Tensor, grads: list[Tensor]) -> tuple[Tensor, torch.optim.Optimizer]:
    param = nn.Parameter(start.clone())
    optimizer = make([param])
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach(), optimizer


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_an_optimizer_in_a_plain_loop_steps_like_torchs(name: str, is_transposed: bool) -> None:
    start = torch.randn(6, 5).t() if is_transposed else torch.randn(5, 6)
    grads = [torch.randn(5, 6) for _ in range(5)]
    ours, plain = PAIRS[name]
    found, wanted = trained(ours, start, grads)[0], trained(plain, start, grads)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_adagrad_takes_sparse_gradients_and_adam_names_the_alternative() -> None:
    grads = [
        torch.sparse_coo_tensor([[1, 3]], torch.randn(2, 4), (6, 4), check_invariants=True)
        for _ in range(3)
    ]
    start = torch.randn(6, 4)
    found = trained(DeepSpeedCPUAdagrad, start, grads)[0]
    wanted = trained(torch.optim.Adagrad, start, [grad.to_dense() for grad in grads])[0]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    with pytest.raises(xds.UsageError, match="sparse gradient.*SparseAdam"):
        trained(FusedAdam, start, grads)


@pytest.mark.parametrize("has_fp32_states", [True, False])
def test_moments_of_bf16_parameters_have_the_dtype_asked_for(has_fp32_states: bool) -> None:
    def make(params: Iterable[Any]) -> torch.optim.Optimizer:
        return DeepSpeedCPUAdam(params, fp32_optimizer_states=has_fp32_states)

    start, grads = torch.randn(70).bfloat16(), [torch.randn(70).bfloat16() for _ in range(3)]
    found, optimizer = trained(make, start, grads)
    (state,) = optimizer.state.values()
    wanted = torch.float32 if has_fp32_states else torch.bfloat16
    assert state["step"] == 3 and state["exp_avg"].dtype == state["exp_avg_sq"].dtype == wanted
    assert found.dtype == torch.bfloat16 and (found - start).abs().max() > 0


@pytest.mark.parametrize("make", [FusedLion, DeepSpeedCPULion])
def test_lion_alone_moves_by_a_sign_times_the_rate(make: Make) -> None:
    start, grad = torch.randn(9), torch.randn(9)
    torch.testing.assert_close(trained(make, start, [grad])[0], start - 1e-3 * grad.sign())


def test_lamb_alone_moves_by_the_rate_times_the_norm() -> None:
    start = torch.randn(50)
    found, _ = trained(FusedLamb, start, [torch.randn(50)])
    torch.testing.assert_close((found - start).norm(), 1e-3 * start.norm(), rtol=1e-4, atol=0.0)


def test_the_engines_adam_is_an_instance_of_deepspeeds_classes() -> None:
    params = [nn.Parameter(torch.ones(3))]
    made = Adam(params, adam_w_mode=False)
    assert isinstance(made, FusedAdam) and isinstance(made, DeepSpeedCPUAdam)
    assert made.adam_w_mode is False
    assert isinstance(FusedAdam(params), torch.optim.Optimizer)
    assert not isinstance(torch.optim.Adam(params), FusedAdam)
    assert not isinstance(FusedAdam(params), DeepSpeedCPUAdam)
