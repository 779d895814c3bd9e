"""The gradient norm, and clipping by it, where squares leave the range of fp32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config
from torch import Tensor, nn

import xds
from xds.ops.kernels.decide import LEAST_SQUARE, exact_square_sum, is_in_range, square_sum
from xds.pipe import PipelineModule
from xds.zero import get_full_grad, get_full_param

WIDTH = 130  # its square has more elements than the threshold below which gradients wait in `.grad`
LR = 0.5
PIPELINE = {"stages": 2, "schedule": "gpipe"}


def engine_of(stage: int, precision: str, **more: Any) -> xds.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    changed = config(stage, precision, optimizer="SGD", params={"lr": LR}, **more)
    return xds.initialize(model, changed)


def backward(engine: xds.Engine, factor: float) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(2, WIDTH, generator=generator).to(next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().square().mean() * factor)


def norms(stage: int) -> None:
    for precision, native, factors in (
        ("fp32", False, (1e21, 1e-25)),
        ("bf16", True, (1e21, 1e-25, 1.0)),
    ):
        for factor in factors:
            check(stage, precision, factor, ops={"native": native})


def check(stage: int, precision: str, factor: float, **more: Any) -> None:
    where = (stage, precision, factor, more)
    limit = factor / 10  # so that every step is clipped
    engine = engine_of(stage, precision, gradient_clipping=limit, **more)
    params = list(engine.module.parameters())
    before = [get_full_param(param) for param in params]
    backward(engine, factor)
    grads = [get_full_grad(param).double() for param in params]
    engine.step()
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
    assert norm > limit > 0, where
    assert engine.was_step_applied(), where
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5), where
    clip = limit / (norm + 1e-6)
    for param, old, grad in zip(params, before, grads, strict=True):
        want = old.double() - LR * clip * grad
        error = (get_full_param(param).double() - want).norm()
        assert error <= 1e-6 * (LR * limit + old.double().norm()), where
    engine.destroy()


def no_number(stage: int) -> None:
    """What is really inf or nan is told as before, and changes nothing; a gradient of zeros has norm 0."""
    for factor, told in ((math.inf, (math.inf, math.nan)), (math.nan, (math.nan,)), (0.0, (0.0,))):
        engine = engine_of(stage, "fp32")
        before = [get_full_param(param) for param in engine.module.parameters()]
        backward(engine, factor)
        if factor == 0.0:
            engine.step()
        else:
            with pytest.raises(xds.XdsError, match="the gradient norm over all ranks is"):
                engine.step()
        norm = engine.get_global_grad_norm()
        assert norm in told or (math.isnan(norm) and any(map(math.isnan, told)))
        for param, old in zip(engine.module.parameters(), before, strict=True):
            assert get_full_param(param).equal(old)
        engine.destroy()


def at_every_stage() -> None:
    for stage in (0, 3):
        norms(stage)
    for stage in (0, 3):
        no_number(stage)


def test_norms_of_any_size() -> None:
    run_ranks(at_every_stage, 2)


def clipped_by_turns(stage: int) -> None:
    """Clipped by the config, below its limit, clipped by the script, and below again: against torch."""
    engine = engine_of(stage, "fp32", gradient_clipping=1.0)
    plain = [get_full_param(param).clone().requires_grad_() for param in engine.module.parameters()]
    optimizer = torch.optim.SGD(plain, lr=LR)
    for factor, limit in ((100.0, 1.0), (0.1, 1.0), (0.1, 1e-3), (0.1, 1.0), (100.0, 1.0)):
        backward(engine, factor)
        for param, own in zip(plain, engine.module.parameters(), strict=True):
            param.grad = get_full_grad(own).clone()
        norm = torch.nn.utils.clip_grad_norm_(plain, limit).item()
        assert (norm > limit) == (factor > 1 or limit < 1)
        if limit < 1:
            assert engine.clip_grad_norm(limit) == pytest.approx(norm)
        engine.step()
        optimizer.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm)
        for param, own in zip(plain, engine.module.parameters(), strict=True):
            torch.testing.assert_close(get_full_param(own), param.detach(), rtol=1e-6, atol=1e-7)
    engine.destroy()


def test_a_clip_is_that_of_its_own_step() -> None:
    for stage in (0, 3):
        run_ranks(clipped_by_turns, 2, stage)


def near_the_least(stage: int) -> None:
    """Stages of very unequal sizes compute the norm again together: one alone would wait for ever."""
    factor = 1.0

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return factor * output.square().mean()

    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]
    numels = [sum(param.numel() for param in layer.parameters()) for layer in layers]
    module = PipelineModule(layers, loss_fn=loss_fn, partition_method="uniform")
    params = {"lr": 0.0}
    changed = config(stage, optimizer="SGD", params=params, pipeline=PIPELINE)
    engine = xds.initialize(module, changed)
    batch = (torch.ones(2, WIDTH), torch.ones(2))
    engine.train_batch(iter([batch]))
    norm = engine.get_global_grad_norm()
    # a square between the limits of the two stages
    factor = math.sqrt(LEAST_SQUARE * math.sqrt(math.prod(numels))) / norm
    engine.train_batch(iter([batch]))
    assert engine.get_global_grad_norm() == pytest.approx(factor * norm, rel=1e-5)
    engine.destroy()


def test_unequal_stages_agree_how_the_norm_is_computed() -> None:
    for stage in (0, 1):
        run_ranks(near_the_least, 2, stage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sums_of_squares_of_any_size(dtype: torch.dtype) -> None:
    """Either the fast sum is right, or `is_in_range` says that it is not; the exact one always is."""
    largest = torch.finfo(dtype).max if dtype == torch.float16 else 3e38
    for numel in (0, 1, 1023, 5000, (1 << 20) + 3):
        base = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).clamp(-1, 1)
        for size in (largest, 1e20, 1e10, 1.0, 1e-14, 1e-16, 1e-19, 1e-25, 1e-37, 0.0):
            flat = (base.double() * min(size, largest)).to(dtype)
            want = float(flat.double().square().sum())
            exact = float(exact_square_sum(flat))
            assert exact == pytest.approx(want, rel=1e-12)
            fast = float(square_sum(flat))
            if is_in_range(fast, numel):
                assert fast == pytest.approx(want, rel=1e-4)
        if numel:
            for wrong in (math.inf, -math.inf, math.nan):
                flat = base.to(dtype)
                flat[numel // 2] = wrong
                assert not math.isfinite(float(exact_square_sum(flat)))
                assert not is_in_range(float(square_sum(flat)), numel)
