"""Tests of gradients in `xds.deepspeed`: shown, set by scripts, a rank's own; and of the engine as a module."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer import assert_close, on_ranks, start
from torch import Tensor, nn

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed.utils import safe_get_full_grad, safe_set_full_grad

MAX_NORM = 0.05


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def batch_of(number: int, rank: int) -> Tensor:
    return torch.randn(1, 5, generator=torch.Generator().manual_seed(number * 10 + rank))


def first_of(engine: Any) -> Any:
    return next(iter(engine.module.parameters()))


# -- gradients that stage 0 shows ---------------------------------------------------------------------------


def plain(steps: int, world_size: int, accumulated: int) -> list[Tensor]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    for step in range(steps):
        for micro in range(accumulated):
            for rank in range(world_size):
                loss = model(batch_of(step * accumulated + micro, rank)).square().sum()
                (loss / world_size / accumulated).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("accumulated", [1, 2])
@on_ranks(2)
def test_gradients_of_stage_0_can_be_clipped_by_torch(accumulated: int) -> None:
    engine = start(build(), accumulation=accumulated, params={"eps": 1e-3})
    for number in range(4 * accumulated):
        engine.backward(engine(batch_of(number, dist.get_rank())).square().sum())
        if engine.is_gradient_accumulation_boundary():
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), MAX_NORM)
            first = first_of(engine)
            torch.testing.assert_close(safe_get_full_grad(first), first.grad)
        engine.step()
        assert all(param.grad is None for param in engine.parameters())
    expected = plain(4, dist.get_world_size(), accumulated)
    assert_close(engine.parameters(), expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_shown_gradients_may_be_set_replaced_and_dropped() -> None:
    engine = start(build())
    for change in ("set", "replace", "zero_grad"):
        engine.backward(engine(batch_of(1, 0)).sum())
        param = first_of(engine)
        if change == "set":
            safe_set_full_grad(param, torch.full_like(param, 2.0))
        elif change == "replace":
            param.grad = torch.full_like(param, 2.0)
        else:
            engine.zero_grad()
            assert param.grad is None
            continue
        assert torch.equal(safe_get_full_grad(param), torch.full_like(param, 2.0))
        engine.step()
        assert engine.get_global_grad_norm() > 2.0 * param.numel() ** 0.5
    for _ in range(2):  # two losses of one step are added
        engine.backward(engine(batch_of(1, 0)).sum())
    both = first_of(engine).grad.clone()
    engine.zero_grad()
    engine.backward(engine(batch_of(1, 0)).sum())
    torch.testing.assert_close(first_of(engine).grad * 2, both)
    with pytest.raises(xds.UsageError, match="for each loss"):
        engine.module(batch_of(1, 0)).sum().backward()
    engine.step()


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb"])
@on_ranks(2)
def test_one_bit_optimizers_train_and_show_no_gradient_once_they_compress(kind: str) -> None:
    engine = start(build(), params={"lr": 1e-3, "freeze_step": 3}, kind=kind)
    shown = []
    for number in range(5):
        engine.backward(engine(batch_of(number, dist.get_rank())).square().sum())
        shown.append(first_of(engine).grad is not None)
        engine.step()
    assert shown[0] and not shown[-1]


@on_ranks(2)
def test_shown_gradients_end_with_their_engine() -> None:
    engine = start(build())
    model = engine.module
    engine.backward(engine(batch_of(1, 0)).sum())
    once = first_of(engine).grad.clone()
    again = start(model, 3)
    again.backward(again(batch_of(1, 0)).sum())
    torch.testing.assert_close(safe_get_full_grad(first_of(again)), once)

    engine = start(build())
    model = engine.module
    engine.backward(engine(batch_of(1, 0)).sum())
    del engine
    gc.collect()
    assert all(param.grad is None for param in model.parameters())


# -- gradients of scripts -----------------------------------------------------------------------------------


@on_ranks(2)
def test_a_step_takes_gradients_that_the_script_has_set() -> None:
    """At stage 0, without a backward, as in DeepSpeed; in fp16 they have the loss scale."""
    model, expected = build(), build()
    engine = start(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    for _ in range(2):
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            param.grad = torch.full_like(param, float(dist.get_rank()))
            other.data.sub_(0.5 * 0.5)  # lr, and the mean of the ranks 0 and 1
        engine.step()
    assert_close(model.parameters(), expected.parameters())
    assert all(param.grad is None for param in model.parameters())
    with pytest.raises(xds.UsageError, match=r"without engine\.backward"):
        engine.step()
    engine = start(build(), fp16=FP16)
    scales = []
    for value in (math.inf, 0.5, -0.5, 0.5, math.nan):
        for param in engine.module.parameters():
            param.grad = torch.full_like(param, value)
        engine.step()
        scales.append(engine.optimizer.cur_scale)
    assert scales == [128.0, 128.0, 128.0, 256.0, 128.0]


FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}


@on_ranks(2)
def test_the_loss_scaler_has_its_state_and_asks_for_scaled_losses() -> None:
    """`optimizer.loss_scaler` counts steps and knows its window, as DeepSpeed's."""
    engine, x = start(build(), 1, fp16=FP16), torch.ones(2, 5, dtype=torch.float16)
    scaler, scales = engine.optimizer.loss_scaler, []
    for value in (math.inf, 0.5, 0.5, 0.5):
        engine.backward(engine(x).sum())
        for param in engine.parameters():
            safe_set_full_grad(param, torch.full_like(param, value))
        engine.step()
        scales.append((scaler.cur_iter, scaler.cur_scale))
    assert scales == [(1, 128.0), (2, 128.0), (3, 128.0), (4, 256.0)]
    assert (scaler.scale_window, scaler.min_scale, scaler.delayed_shift) == (2, 1, 1)
    assert scaler.dynamic and scaler.loss_scale == 256.0 and scaler.last_overflow_iter == 0
    # scripts catch RuntimeError, and look for these words
    with pytest.raises(RuntimeError, match="^Loss scaling is required") as caught:
        engine(x).sum().backward()
    assert isinstance(caught.value, xds.UsageError)
    scaler = start(build(), 1, fp16={"enabled": True, "loss_scale": 64.0}).optimizer.loss_scaler
    assert scaler.cur_scale == 64.0 and not scaler.dynamic and not hasattr(scaler, "scale_window")


@on_ranks(2)
def test_unused_parameters_are_an_error_where_the_config_asks_for_it() -> None:
    """zero_optimization.ignore_unused_parameters = false, with an offloaded optimizer at stages 1 and 2."""
    zero = {"ignore_unused_parameters": False, "offload_optimizer": {"device": "cpu"}}
    model = nn.ModuleDict({"used": nn.Linear(5, 1), "other": nn.Linear(5, 1)})
    engine = start(model, 2, zero=zero, accumulation=2)
    assert engine.zero_ignore_unused_parameters() is False
    for names in (("used", "other"), ("used", "used")):
        for name in names:  # in some micro-batch is enough
            engine.backward(engine.module[name](batch_of(1, 0)).sum())
            if names != ("used", "used") or not engine.is_gradient_accumulation_boundary():
                engine.step()
    said = r"ignore_unused_parameters.*other\.weight, other\.bias;"
    with pytest.raises(AssertionError, match=said):
        engine.step()


# -- one rank's own -----------------------------------------------------------------------------------------


def assert_grads(engine: Any, ranks: list[int], factor: float) -> None:
    """Those of the mean of these ranks' losses, times `factor`."""
    model = build()
    for rank in ranks:
        (model(batch_of(0, rank)).sum() * factor / len(ranks)).backward()
    found = [safe_get_full_grad(param) for param in engine.module.parameters()]
    assert all(grad.dtype == torch.float32 for grad in found)
    assert_close(found, [param.grad for param in model.parameters()], rtol=3e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("stage", "precision", "op"), [(0, "bf16", "sum"), (0, "fp32", "mean"), (1, "fp16", "mean")]
)
@on_ranks(2)
def test_a_gradient_that_is_not_summed_yet_is_the_ranks_own(
    stage: int, precision: str, op: str
) -> None:
    rank = dist.get_rank()
    engine = start(build(), stage, precision, accumulation=2, gradient_allreduce_op=op)
    inputs = batch_of(0, rank).to(first_of(engine).dtype)
    with engine.no_sync():
        for factor in (0.5, 1.0):
            engine.backward(engine(inputs).sum())
            assert_grads(engine, [rank], factor)
    engine.zero_grad()
    engine.backward(engine(inputs).sum())
    assert_grads(engine, [rank], 0.5)  # not the last of the step
    engine.step()
    engine.backward(engine(inputs).sum())
    assert_grads(engine, [0, 1], 1.0 if op == "mean" else 2.0)
    with pytest.raises(AssertionError, match="scalar tensor"):
        engine.scale(torch.ones(2, 2, requires_grad=True))
    engine.step()


# -- the engine is a module ---------------------------------------------------------------------------------


@on_ranks(1)
def test_an_engine_has_the_names_of_a_module_with_one_child() -> None:
    engine = start(build(), 1)
    assert isinstance(engine, nn.Module) and isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine.get_global_grad_norm() is None
    engine.backward(engine(batch_of(1, 0)).sum())
    engine.step()
    norm = engine.get_global_grad_norm()
    assert isinstance(norm, Tensor) and norm.shape == () and norm.item() > 0
    assert engine.to("cpu") is engine and engine.apply(lambda one: None) is engine
    assert engine.train() is engine and engine.eval() is engine
    names = [f"module.{name}" for name, _ in engine.module.named_parameters()]
    assert [name for name, _ in engine.named_parameters()] == names == list(engine.state_dict())
    assert [name for name, _ in engine.named_parameters("a")][0] == "a.module.0.weight"
    inside = [f"module.{name}" if name else "module" for name, _ in engine.module.named_modules()]
    assert [name for name, _ in engine.named_modules()] == ["", *inside]
    assert list(engine.children()) == [engine.module] and next(engine.modules()) is engine
    kept = {name: value.clone() for name, value in engine.state_dict().items()}
    with pytest.raises(xds.UsageError, match="no_sync"):
        engine.enable_backward_allreduce = False
    engine.enable_backward_allreduce = True
    engine.load_state_dict(kept)
    engine.load_state_dict({name.removeprefix("module."): one for name, one in kept.items()})
    outer = nn.ModuleDict({"reward": engine.train()})
    outer.eval()
    assert not engine.module.training and not engine.training and outer["reward"] is engine
    assert list(outer.state_dict()) == [f"reward.{name}" for name in names]
