"""fp32 masters whose upper halves are the bf16 parameters: bits of a loop, bytes, checkpoints, who has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_ranks
from models import build, micro_batch
from rounded_runs import DECAY, EPS, of_world
from runs import config
from torch import Tensor, nn

import xds
from xds.ops.kernels.adam import adam_
from xds.ops.libraries import load

SPLIT = {"enabled": True}
FP32 = {"enabled": True, "master_weights": "fp32"}
CPU = {"offload_optimizer": {"device": "cpu"}}


def given(stage: int, bf16: dict[str, Any], zero: dict[str, Any] | None = None) -> dict[str, Any]:
    params = {"weight_decay": DECAY, "eps": EPS}
    return config(stage, samples=4, zero=zero, params=params, bf16=bf16)


def rounded_away(value: Tensor) -> Tensor:
    """To bf16; from the middle of two to the larger magnitude. Written apart from the code under test."""
    low, middle = value.bfloat16().float(), torch.full_like(value, torch.inf)
    steps = (
        torch.nextafter(value.bfloat16(), side.bfloat16()).float() for side in (middle, -middle)
    )
    is_further = [(step - value).abs() == (low - value).abs() for step in steps]
    up, down = (
        torch.nextafter(value.bfloat16(), side.bfloat16()).float() for side in (middle, -middle)
    )
    low = torch.where(is_further[0] & (up.abs() > low.abs()), up, low)
    return torch.where(is_further[1] & (down.abs() > low.abs()), down, low).bfloat16()


def in_a_loop(
    model: nn.Module,
    steps: int,
    loss_of: Any,
    *,
    is_split: bool,
    decays: dict[str, float] | None = None,
    frozen: str = "",
) -> dict[str, Tensor]:
    """The fp32 masters of a loop of plain torch, and one call of the kernel for each parameter.

    From step 2 on the parameter `frozen` keeps its value.
    """
    load("cpu")
    params = dict(model.named_parameters())
    masters = {name: param.data.reshape(-1).float() for name, param in params.items()}
    moments = {name: [torch.zeros_like(masters[name]) for _ in range(2)] for name in params}
    for step in range(steps):
        loss_of(model, step).backward()
        for name, param in params.items():
            assert param.grad is not None
            if step >= 2 and name == frozen:
                continue
            decay = (decays or {}).get(name, DECAY)
            adam_(
                *(masters[name], param.grad.reshape(-1), *moments[name], None),
                *(torch.tensor(step + 1.0), None, None),
                *(1e-2, 0.9, 0.999, EPS, decay, True, True),
            )
            rounded = rounded_away(masters[name]) if is_split else masters[name].bfloat16()
            param.data.view(-1).copy_(rounded)
            param.grad = None
    return masters


def loss_of_batch(model: nn.Module, step: int) -> Tensor:
    return model(micro_batch(step, 0))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("bf16", "world"), [(SPLIT, 1), (SPLIT, 2), (SPLIT, 4), (FP32, 2)])
@pytest.mark.quick("bf160-1", "bf163-2")
def test_ranks_stages_places_and_resumes_change_no_bit(
    bf16: dict[str, Any], world: int, tmp_path: Path
) -> None:
    model = build("tied").bfloat16()
    masters = in_a_loop(model, 4, loss_of_batch, is_split=bf16 is SPLIT)
    case_of = lambda stage, zero: given(stage, bf16, zero)  # noqa: E731 (ranks are threads)
    for per_rank in run_ranks(of_world, world, case_of, str(tmp_path), True):
        for name, found in per_rank.items():
            for key, value in masters.items():
                assert found[key].reshape(-1).equal(value), (name, key)


WIDTH = 12


def line() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 33), nn.ReLU(), nn.Linear(33, WIDTH))


def loss_of_line(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
    return (model(x) - x).square().mean()


def a_thousand_steps(folder: str) -> tuple[dict[str, Tensor], int]:
    """Its masters at last, and how many values were in the middle of two bf16 meanwhile. It resumes once."""
    settings, ties = given(0, SPLIT), 0
    engine = xds.initialize(line(), settings)
    for step in range(1000):
        if step == 500:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = xds.initialize(line(), settings)
            engine.load_checkpoint(folder)
        engine.backward(loss_of_line(engine, step))
        engine.step()
        for master in engine._parts.updater.masters:
            ties += int((master.memory == -(2**15)).sum())
    return engine.full_state_dict(full_precision=True), ties


def test_masters_are_those_of_a_loop_after_a_thousand_steps(tmp_path: Path) -> None:
    [(found, ties)] = run_ranks(a_thousand_steps, 1, str(tmp_path))
    masters = in_a_loop(line().bfloat16(), 1000, loss_of_line, is_split=True)
    for key, value in masters.items():
        assert found[key].reshape(-1).equal(value), key
    assert ties > 0


FROZEN = "0.bias"


def grouped_and_frozen(stage: int) -> dict[str, Tensor]:
    model = line()
    weights = [param for param in model.parameters() if param.ndim == 2]
    biases = {"params": [param for param in model.parameters() if param.ndim == 1]}
    groups = [{"params": weights}, biases | {"weight_decay": 0.0}]
    engine = xds.initialize(model, given(stage, SPLIT), model_parameters=groups)
    for step in range(4):
        engine.module[0].bias.requires_grad_(step < 2)
        engine.backward(loss_of_line(engine, step))
        engine.step()
    masters = engine.full_state_dict(rank0_only=False, full_precision=True)
    engine.destroy()
    return masters


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_groups_share_a_buffer_and_a_frozen_parameter_keeps_every_bit(stage: int) -> None:
    decays = {"0.bias": 0.0, "2.bias": 0.0}
    model = line().bfloat16()
    masters = in_a_loop(model, 4, loss_of_line, is_split=True, decays=decays, frozen=FROZEN)
    for found in run_ranks(grouped_and_frozen, 2, stage):
        for key, value in masters.items():
            assert found[key].reshape(-1).equal(value), key


def bytes_of(stage: int) -> tuple[dict[str, int], int, int, int]:
    engine = xds.initialize(line(), given(stage, SPLIT) | {"gradient_accumulation_steps": 2})
    for step in range(2):
        engine.backward(loss_of_line(engine, step))
        engine.step()
    memory = engine._sharded.memory
    layouts = [flat.layout for unit in engine._sharded.units for flat in unit.params]
    numel, part = sum(each.numel for each in layouts), sum(each.shard_numel for each in layouts)
    return engine.memory_plan(), memory.expected_bytes(2)[0], numel, part


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_takes_16_bytes(stage: int) -> None:
    for held, expected, numel, part in run_ranks(bytes_of, 2, stage):
        params, states = part if stage == 3 else numel, numel if stage == 0 else part
        grads = part if stage >= 2 else numel
        assert (held["param"], held["master"]) == (2 * params, 2 * states)
        steps = held["optimizer"] - 8 * states
        assert 0 < steps <= 64  # the counts of steps
        assert expected == 2 * params + 4 * grads + 2 * states + 8 * states


def across(first: dict[str, Any], then: dict[str, Any], folder: str) -> tuple[Any, Any]:
    """The masters at a save in the background, and those that are loaded from it after a step."""
    more = {"checkpoint": {"async_save": True}}
    engine = xds.initialize(line(), first | more)
    engine.backward(loss_of_line(engine, 0))
    engine.step()
    saved = engine.full_state_dict(rank0_only=False, full_precision=True)
    engine.save_checkpoint(folder)
    engine.backward(loss_of_line(engine, 1))
    engine.step()
    engine.destroy()
    engine = xds.initialize(line(), then)
    engine.load_checkpoint(folder)
    loaded = engine.full_state_dict(rank0_only=False, full_precision=True)
    engine.destroy()
    return saved, loaded


def test_a_checkpoint_holds_fp32_masters_and_loads_everywhere(tmp_path: Path) -> None:
    narrow = {**SPLIT, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    pairs = [
        (given(3, SPLIT), given(1, SPLIT)),
        (given(1, SPLIT), given(0, FP32)),
        (given(2, FP32), given(3, SPLIT)),
        (given(0, SPLIT), given(2, SPLIT, CPU)),
        (given(2, SPLIT, CPU), given(0, SPLIT)),
        (given(1, SPLIT), given(3, narrow)),
    ]
    for number, (first, then) in enumerate(pairs):
        for saved, loaded in run_ranks(across, 2, first, then, str(tmp_path / str(number))):
            for name, value in saved.items():
                is_narrow = "bf16_optimizer_states" in then["bf16"]
                assert value.dtype == torch.float32 and not value.equal(value.bfloat16().float())
                wanted = value.bfloat16().float() if is_narrow else value
                assert loaded[name].equal(wanted), (number, name)


def written() -> None:
    """A script's writes to whole parameters: what is written counts, and other elements stay exact."""
    engine = xds.initialize(line(), given(0, SPLIT))
    engine.backward(loss_of_line(engine, 0))
    engine.step()
    weight = engine.module[0].weight
    before = xds.zero.get_full_param(weight)
    with torch.no_grad():  # the values of before come back with all their bits
        kept = weight.clone()
        weight.mul_(2)
        weight.copy_(kept)
    assert xds.zero.get_full_param(weight).equal(before)
    with torch.no_grad():
        weight[0] = torch.inf
        weight[1] = 0
        weight[2] = -torch.inf
        weight[3] = torch.nan
        weight[4] = 1.5
    master = xds.zero.get_full_param(weight)
    assert not master[1].any() and master[3].isnan().all()
    assert master[5:].equal(before[5:])
    assert master[:5].bfloat16()[[0, 1, 2, 4]].equal(weight.data[[0, 1, 2, 4]])
    values = (torch.linspace(-1, 1, weight.numel()) * 3.4e38).view_as(weight)
    values[0, :2] = torch.tensor([1 + 2**-8, -1 - 2**-8])  # in the middle of two bf16
    xds.zero.set_full_param(weight, values)
    assert xds.zero.get_full_param(weight).equal(values)
    assert weight.data.equal(rounded_away(values))
    engine.module.load_state_dict({k: v + 1 for k, v in engine.module.state_dict().items()})
    assert xds.zero.get_full_param(engine.module[2].weight).equal(engine.module[2].weight.float())
    engine.destroy()


def test_a_scripts_writes_count() -> None:
    run_ranks(written, 1)


def held_bytes(case: dict[str, Any], gives: bool) -> int:
    model = line()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if gives else None
    engine = xds.initialize(model, case, optimizer=optimizer)
    engine.backward(loss_of_line(engine, 0))
    engine.step()
    plan = engine.memory_plan()
    engine.destroy()
    return (plan["master"] or plan["host"]) // plan["param"]


def test_masters_stay_whole_where_halves_do_not_serve() -> None:
    others = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}}
    script = {key: value for key, value in given(0, SPLIT).items() if key != "optimizer"}
    for case, gives, master_bytes in (
        (given(0, SPLIT), False, 2),
        (given(0, FP32), False, 4),
        (given(0, SPLIT) | others, False, 4),
        (script, True, 4),
    ):
        assert run_ranks(held_bytes, 1, case, gives) == [master_bytes // 2], case


def refused() -> None:
    with pytest.raises(xds.ConfigError, match='bf16.master_weights.*"split" or "fp32"'):
        xds.initialize(line(), given(0, {"enabled": True, "master_weights": "half"}))


def test_another_name_is_refused() -> None:
    run_ranks(refused, 1)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_load_after_an_edit_has_every_bit(tmp_path: Path, stage: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = xds.initialize(torch.nn.Linear(8, 8), config)
    engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path)
    saved = engine.full_state_dict(full_precision=True)
    with torch.no_grad(), xds.zero.GatheredParameters(engine.module, modifier_rank=0):
        for param in engine.module.parameters():
            param.fill_(0.5)
    engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean())
    engine.load_checkpoint(tmp_path)
    loaded = engine.full_state_dict(full_precision=True)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    engine.destroy()
