"""Tests of `xds.deepspeed` where a script reads the engine's inner state around a backward of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from warm_ranks import warm

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed.utils import (
    safe_set_full_grad,
)

SMALL_GRADIENT = 0.125


class Branches(nn.Module):
    """Two layers in a list that scripts mark as a leaf, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.branches[0](x) + self.branches[1](x)).sum()


def engine_of(model: nn.Module, stage: int, **options: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **options,
    }
    config["zero_optimization"].update(options.get("zero", {}))
    config.pop("zero", None)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def batch(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((2, 6), dist.get_rank() + 1.0, dtype=dtype)


def unscaled_loss() -> None:
    engine = engine_of(Branches(), 1, fp16={"enabled": True, "initial_scale_power": 8})
    with pytest.raises(RuntimeError, match="^Loss scaling is required") as caught:
        engine(batch(torch.float16)).backward()
    assert isinstance(caught.value, xds.UsageError)
    engine.destroy()


def test_a_loss_without_the_scale_is_deepspeeds_runtime_error() -> None:
    """Scripts catch RuntimeError, and look for the words "Loss scaling is required"."""
    warm(2).run(unscaled_loss)


def hooks_of_generation() -> None:
    engine = engine_of(Branches(), 3)
    held = engine.optimizer.parameter_offload
    assert held.forward_hooks and held.backward_hooks
    coordinator = held.get_param_coordinator()
    assert coordinator.is_invalid_trace()
    engine(batch())
    assert coordinator.is_complete_trace()
    held._remove_module_hooks()  # as TRL does around generation
    assert engine.optimizer.parameter_offload.forward_hooks == []
    held._register_deepspeed_module(held.module)
    assert held.forward_hooks and held is engine.optimizer.parameter_offload
    assert coordinator.is_invalid_trace()  # the order of the forward before does not count
    engine.backward(engine(batch()))
    assert not coordinator.is_invalid_trace() and not coordinator.is_record_trace()
    engine.step()
    engine.destroy()


def test_hooks_are_away_while_a_model_generates() -> None:
    """Libraries count them."""
    warm(2).run(hooks_of_generation)


def scaler_of_overflows() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    engine = engine_of(Branches(), 1, fp16=fp16)
    scaler, scales = engine.optimizer.loss_scaler, []
    for value in (math.inf, 0.5, 0.5, 0.5):
        engine.backward(engine(batch(torch.float16)))
        for param in engine.parameters():
            safe_set_full_grad(param, torch.full_like(param, value))
        engine.step()
        scales.append((scaler.cur_iter, scaler.cur_scale))
    assert scales == [(1, 128.0), (2, 128.0), (3, 128.0), (4, 256.0)]
    assert (scaler.scale_window, scaler.min_scale, scaler.delayed_shift) == (2, 1, 1)
    assert scaler.dynamic and scaler.loss_scale == 256.0 and scaler.last_overflow_iter == 0
    engine.destroy()
    engine = engine_of(Branches(), 1, fp16={"enabled": True, "loss_scale": 64.0})
    scaler = engine.optimizer.loss_scaler
    assert scaler.cur_scale == 64.0 and not scaler.dynamic and not hasattr(scaler, "scale_window")
    engine.destroy()


def test_the_loss_scaler_has_its_state() -> None:
    """`optimizer.loss_scaler` counts steps and knows its window, as DeepSpeed's."""
    warm(2).run(scaler_of_overflows)


def gradients_of_the_script() -> None:
    torch.manual_seed(3)
    plain = Branches()
    torch.manual_seed(3)
    model = Branches()
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for _ in range(2):
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            param.grad = torch.full_like(param, float(dist.get_rank()))
            other.data.sub_(0.5 * 0.5)  # lr, and the mean of the ranks 0 and 1
        engine.step()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, other)
        assert param.grad is None
    with pytest.raises(xds.UsageError, match=r"without engine\.backward"):
        engine.step()
    engine.destroy()
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    engine = engine_of(Branches(), 0, fp16=fp16)
    scales = []
    for value in (math.inf, 0.5, -0.5, 0.5, math.nan):
        for param in engine.module.parameters():
            param.grad = torch.full_like(param, value)
        engine.step()
        scales.append(engine.optimizer.cur_scale)
    assert scales == [128.0, 128.0, 128.0, 256.0, 128.0]
    engine.destroy()


def test_a_step_takes_gradients_that_the_script_has_set() -> None:
    """At stage 0, without a backward, as in DeepSpeed; in fp16 they have the loss scale."""
    warm(2).run(gradients_of_the_script)


def unused_parameters() -> None:
    asked = {"ignore_unused_parameters": False, "offload_optimizer": {"device": "cpu"}}
    model = nn.ModuleDict({"used": nn.Linear(6, 1), "other": nn.Linear(6, 1)})
    engine = engine_of(model, 2, zero=asked, gradient_accumulation_steps=2)
    assert engine.zero_ignore_unused_parameters() is False
    model = engine.module
    for names in (("used", "other"), ("used", "used")):
        for name in names:  # in some micro-batch is enough
            engine.backward(model[name](batch()).sum())
            if names != ("used", "used") or not engine.is_gradient_accumulation_boundary():
                engine.step()
    with pytest.raises(
        AssertionError, match=r"ignore_unused_parameters.*other\.weight, other\.bias;"
    ):
        engine.step()
    engine.destroy()


def test_unused_parameters_are_an_error_where_the_config_asks_for_it() -> None:
    """zero_optimization.ignore_unused_parameters = false, with an offloaded optimizer at stages 1 and 2."""
    warm(2).run(unused_parameters)
