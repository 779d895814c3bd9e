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
from xds.deepspeed.runtime.utils import (
    CheckOverflow,
    combine_grad_norm_groups,
    get_global_norm,
    get_global_norm_of_tensors,
)
from xds.deepspeed.runtime.zero import unwrap_model_for_generation
from xds.deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from xds.deepspeed.runtime.zero.offload_states import (
    get_state_devices,
    offload_optimizer_states,
    reload_optimizer_states,
)
from xds.deepspeed.runtime.zero.refused import check_zero
from xds.deepspeed.utils import (
    safe_get_local_grad,
    safe_set_full_grad,
    safe_set_local_grad,
    set_z3_leaf_modules,
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


def leaves_and_norms() -> None:
    torch.manual_seed(3)
    model = Branches()
    set_z3_leaf_modules(model, [nn.ModuleList])
    engine = engine_of(model, 3)
    optimizer = engine.optimizer
    assert list(optimizer.leaf_parameters) == [model.branches]
    own = optimizer.leaf_parameters[model.branches]
    assert all(a is b for a, b in zip(own, model.branches.parameters(), strict=True))
    assert optimizer._get_norm_groups() == []
    engine.backward(engine(batch()))
    (before,) = optimizer._get_norm_groups()
    for param in engine.parameters():
        grad = safe_get_local_grad(param)
        assert grad is not None
        safe_set_local_grad(param, grad.clamp(-SMALL_GRADIENT, SMALL_GRADIENT))
    (after,) = optimizer._get_norm_groups()
    assert after < before
    engine.step()
    assert math.isclose(float(after), float(optimizer._global_grad_norm), rel_tol=1e-5)
    engine.destroy()


def test_stage_3_lists_its_leaves_and_the_norms_of_its_groups() -> None:
    """The norms follow what a script has written into its gradients, and are the norm of the step."""
    warm(2).run(leaves_and_norms)


def hooks_of_generation() -> None:
    engine = engine_of(Branches(), 3)
    held = engine.optimizer.parameter_offload
    assert held.forward_hooks and held.backward_hooks
    coordinator = held.get_param_coordinator()
    assert coordinator.is_invalid_trace()
    engine(batch())
    assert coordinator.is_complete_trace()
    with pytest.raises(KeyError), unwrap_model_for_generation(engine):
        assert engine.optimizer.parameter_offload.forward_hooks == []
        raise KeyError
    assert held.forward_hooks and held is engine.optimizer.parameter_offload
    assert coordinator.is_invalid_trace()  # the order of the forward before does not count
    engine.backward(engine(batch()))
    assert not coordinator.is_invalid_trace() and not coordinator.is_record_trace()
    engine.step()
    engine.destroy()


def test_hooks_are_away_while_a_model_generates() -> None:
    """Libraries count them; they come back where the block raises too."""
    warm(2).run(hooks_of_generation)


def second_shard() -> None:
    torch.manual_seed(3)
    plain = Branches()
    engine = engine_of(Branches(), 3)
    assert all(param.ds_secondary_tensor is None for param in engine.parameters())
    assert all(param.ds_zero_param_process_group is None for param in engine.parameters())
    engine.destroy()
    torch.manual_seed(3)
    engine = engine_of(Branches(), 3, zero={"zero_hpz_partition_size": 2})
    for param, other in zip(engine.parameters(), plain.parameters(), strict=True):
        second, flat = param.ds_secondary_tensor, other.detach().flatten()
        assert second.numel() % param.ds_tensor.numel() == 0
        padded = nn.functional.pad(flat, (0, 2 * second.numel() - flat.numel()))
        assert torch.equal(second + 0, padded.chunk(2)[dist.get_rank() % 2])
    with pytest.raises(xds.UsageError, match="for reading"):
        next(engine.parameters()).ds_secondary_tensor.zero_()
    engine.destroy()


def test_the_second_shard_of_zeropp_is_an_attribute() -> None:
    """`ds_secondary_tensor` has the elements of DeepSpeed's second shard; it is None without one."""
    warm(4).run(second_shard)


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


@pytest.mark.parametrize("stage", [1, 3])
def test_untested_optimizers_are_refused_where_the_config_forbids_them(stage: int) -> None:
    """zero_allow_untested_optimizer = false is a wish; without the key xds decides by itself."""
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    forbidding = {**config, "zero_allow_untested_optimizer": False}
    weights = [nn.Parameter(torch.zeros(2))]
    check_zero(forbidding, torch.optim.AdamW(weights))
    check_zero(config, torch.optim.SGD(weights))
    check_zero({**forbidding, "optimizer": {"type": "Adam"}}, None)
    check_zero({**forbidding, "zero_optimization": {"stage": 0}}, torch.optim.SGD(weights))
    with pytest.raises(xds.UsageError, match="SGD with zero_allow_untested_optimizer = false"):
        check_zero(forbidding, torch.optim.SGD(weights))
    with pytest.raises(xds.UsageError, match="zero_allow_untested_optimizer = false"):
        check_zero({**forbidding, "optimizer": {"type": "SGD"}}, None)


def states_and_devices() -> None:
    engine = engine_of(Branches(), 3, bf16={"enabled": True})
    engine.backward(engine(batch(torch.bfloat16)))
    held = engine.optimizer.grad_partitions_flat_buffer
    parts = [one for found in engine.optimizer.averaged_gradients.values() for one in found]
    assert torch.equal(held, torch.cat(parts)) and held.any()
    engine.step()
    engine.offload_states()
    engine.reload_states()
    assert engine.optimizer.grad_partitions_flat_buffer.eq(torch.zeros_like(held)).all()
    for state in OffloadStateTypeEnum:
        assert get_state_devices(engine, state) == {torch.device("cpu")}
    engine.offload_states()
    assert get_state_devices(engine, OffloadStateTypeEnum.contiguous_grad_buffer) == set()
    engine.destroy()


def test_places_of_states_and_the_flat_gradients_of_stage_3() -> None:
    """Scripts ask where a state is after offload_states, and read the flat buffer of gradients."""
    warm(2).run(states_and_devices)


def test_norms_that_are_no_norms_stay_invalid() -> None:
    """A norm of -1 stands for one that is not finite: its square is not part of a sum."""
    for bad in (-1.0, math.nan, math.inf):
        assert get_global_norm([3.0, bad]) == math.inf
        assert combine_grad_norm_groups([torch.tensor(3.0), bad]) == math.inf
        assert CheckOverflow().check_using_norm([bad], reduce_overflow=False)
    assert combine_grad_norm_groups([3.0, torch.tensor(4.0)]) == 5.0
    assert get_global_norm_of_tensors([torch.tensor([1.0, math.nan])]) == -1.0


def test_states_of_a_plain_optimizer_move() -> None:
    """The tensors are replaced in the optimizer's state."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    offload_optimizer_states(optimizer, "cpu")
    before = reload_optimizer_states(optimizer, "cpu")
    assert any(one is optimizer.state[weight]["exp_avg"] for one in before)


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
