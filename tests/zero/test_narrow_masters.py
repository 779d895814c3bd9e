"""16-bit master weights: every stage, number of ranks, place and resume gives the bits of one plain loop."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_ranks
from models import build, micro_batch
from rounded_runs import DECAY, EPS, SEED, STEPS, of_world, trained
from runs import config, differing
from torch import Tensor

import xds
from xds.ops.kernels.adam import adam_
from xds.ops.libraries import load
from xds.ops.rounding import draw_rows

BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "rounding_seed": SEED}
STATES = {**BF16, "bf16_optimizer_states": True}
FP16 = {
    "enabled": True,
    "loss_scale": 8,
    "fp16_master_weights_and_grads": True,
    "rounding_seed": SEED,
}
NEAREST = {"master_rounding": "nearest"}


def given(stage: int, half: dict[str, Any], zero: dict[str, Any] | None = None) -> dict[str, Any]:
    section = "fp16" if "loss_scale" in half else "bf16"
    return config(
        stage, samples=4, zero=zero, params={"weight_decay": DECAY, "eps": EPS}, **{section: half}
    )


def in_a_loop(half: dict[str, Any], parts: int = 1) -> dict[str, Tensor]:
    """The same by autograd and one call of the kernel for each parameter. parts: micro-batches of a step."""
    load("cpu")
    is_fp16 = "loss_scale" in half
    dtype, scale = (torch.float16, 8.0) if is_fp16 else (torch.bfloat16, 1.0)
    states = torch.bfloat16 if half.get("bf16_optimizer_states") else torch.float32
    model = build("tied").to(dtype)
    moments = {
        name: [torch.zeros(param.numel(), dtype=states) for _ in range(2)]
        for name, param in model.named_parameters()
    }
    for step in range(STEPS):
        for part in range(parts):
            (model(micro_batch(parts * step + part, 0)) * scale / parts).backward()
        for name, param in model.named_parameters():
            flat, grad = param.data.view(-1), param.grad
            assert grad is not None
            rows = draw_rows([(0, flat.numel(), 0, name)], SEED)
            adam_(
                *(flat, grad.reshape(-1), *moments[name], None, torch.tensor(step + 1.0)),
                *(torch.tensor(1 / scale), None, 1e-2, 0.9, 0.999, EPS, DECAY, True, True),
                draws=None if half.get("master_rounding") == "nearest" else rows,
            )
            param.grad = None
    return dict(model.named_parameters())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.quick("1", "2")
def test_ranks_stages_places_and_resumes_change_no_bit(world: int, tmp_path: Path) -> None:
    wanted = in_a_loop(STATES)
    case_of = lambda stage, zero: given(stage, STATES, zero)  # noqa: E731 (ranks are threads)
    for per_rank in run_ranks(of_world, world, case_of, str(tmp_path)):
        for name, found in per_rank.items():
            for key, value in wanted.items():
                assert torch.equal(found[key].to(value.dtype), value), (name, key)


@pytest.mark.parametrize("half", [BF16, BF16 | NEAREST, FP16, FP16 | NEAREST])
def test_each_precision_has_the_bits_of_a_loop(half: dict[str, Any], tmp_path: Path) -> None:
    """Also where states of 32 bits are on a disk beside masters of 16."""
    wanted = in_a_loop(half)
    for zero in ({}, {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}):
        (found, _) = run_ranks(trained, 2, given(1, half, zero), str(tmp_path))
        for key, value in wanted.items():
            assert torch.equal(found[key].to(value.dtype), value), key
    other = in_a_loop({**half, **NEAREST}) if "master_rounding" not in half else None
    assert other is None or differing(other, wanted)


def accumulated(stage: int, *, by_hand: bool) -> dict[str, Tensor]:
    """Two micro-batches a step, by the config or by `no_sync`."""
    case = given(stage, STATES) | {"gradient_accumulation_steps": 1 if by_hand else 2}
    engine = xds.initialize(build("tied"), case)
    for at in range(2 * STEPS):
        with engine.no_sync() if by_hand and at % 2 == 0 else nullcontext():
            loss = engine(micro_batch(at, 0))
            engine.backward(loss / 2 if by_hand else loss)
        if at % 2 or not by_hand:
            engine.step()
    found = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return found


def test_sums_of_micro_batches_are_those_of_autograd_in_16_bits() -> None:
    wanted = in_a_loop(STATES, parts=2)
    for stage, by_hand in ((0, False), (3, False), (2, True)):
        (found, _) = run_ranks(partial(accumulated, by_hand=by_hand), 2, stage)
        for key, value in wanted.items():
            assert torch.equal(found[key].to(value.dtype), value), (stage, by_hand, key)


def across(half: dict[str, Any], other: dict[str, Any], folder: str) -> dict[str, Any]:
    """Save with `half` and load with `other`, in another stage; what is equal then."""
    engine = xds.initialize(build("tied"), given(3, half))
    for step in range(2):
        engine.backward(engine(micro_batch(step, 0)))
        engine.step()
    engine.save_checkpoint(folder)
    saved = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    engine = xds.initialize(build("tied"), given(1, other))
    engine.load_checkpoint(folder)
    loaded = engine.full_state_dict(rank0_only=False)
    weight = "head.bias"
    (param,) = [param for name, param in engine.module.named_parameters() if name == weight]
    moments = xds.zero.get_full_optimizer_state(param, "exp_avg_sq")
    engine.backward(engine(micro_batch(2, 0)))
    engine.step()
    states = [state["exp_avg"].dtype for state in engine.optimizer.state.values()]
    engine.destroy()
    return {"saved": saved, "loaded": loaded, "moments": moments, "states": states}


FP32 = {"enabled": True}


@pytest.mark.parametrize(
    ("half", "other"), [(FP32, STATES), (STATES, FP32), (BF16, STATES), (STATES, BF16)]
)
@pytest.mark.quick("half0-other0", "half2-other2")
def test_a_checkpoint_of_one_variant_loads_into_another(
    half: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    for found in run_ranks(across, 2, half, other, str(tmp_path)):
        for name, value in found["saved"].items():
            assert torch.equal(found["loaded"][name], value), name
        assert found["moments"].abs().sum() > 0
        is_narrow = other.get("bf16_optimizer_states", False)
        assert set(found["states"]) == {torch.bfloat16 if is_narrow else torch.float32}


def after_a_state_dict(sections: dict[str, Any], params: dict[str, Any]) -> None:
    """A script loads what it has just read: parameters, states and their dtypes are those without it."""
    found = []
    for loads in (False, True):
        engine = xds.initialize(build("tied"), config(1, samples=4, params=params, **sections))
        for step in range(3):
            engine.backward(engine(micro_batch(step, 0)))
            engine.step()
            if loads and step == 1:
                engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        states = [
            (key, value.clone())
            for state in engine.optimizer.state.values()
            for key, value in state.items()
        ]
        found.append([*engine.full_state_dict(rank0_only=False).items(), *states])
        engine.destroy()
    for (key, value), (other, expected) in zip(*found, strict=True):
        assert key == other and value.dtype == expected.dtype and torch.equal(value, expected), key


@pytest.mark.parametrize(
    ("sections", "params"),
    [
        ({"bf16": BF16}, {}),
        ({"bf16": STATES}, {}),
        ({"fp16": FP16}, {}),
        ({"bf16": FP32}, {"state_dtype": "bf16"}),
        ({"bf16": BF16}, {"state_dtype": "int8"}),
        ({}, {"state_dtype": "int8"}),
    ],
)
def test_a_state_dict_of_the_script_keeps_values_and_dtypes(
    sections: dict[str, Any], params: dict[str, Any]
) -> None:
    run_ranks(after_a_state_dict, 2, sections, params)


def test_a_state_dict_of_another_state_dtype_is_refused() -> None:
    engines = [
        xds.initialize(build("tied"), config(0, samples=4, params={"state_dtype": dtype}))
        for dtype in ("int8", "fp32")
    ]
    for engine in engines:
        engine.backward(engine(micro_batch(0, 0)))
        engine.step()
    for engine, other in (engines, engines[::-1]):
        before = engine.optimizer.state_dict()["state"]
        with pytest.raises(xds.UsageError, match="use engine.load_checkpoint"):
            engine.optimizer.load_state_dict(other.optimizer.state_dict())
        after = engine.optimizer.state_dict()["state"]
        for number, state in before.items():
            assert all(torch.equal(value, after[number][key]) for key, value in state.items())
    for engine in engines:
        engine.destroy()


def test_a_compiled_model_draws_the_same_numbers() -> None:
    plain, compiled = (draw_rows([(0, 4, 0, f"{prefix}w")], SEED) for prefix in ("", "_orig_mod."))
    assert torch.equal(plain, compiled)


class Uneven(torch.nn.Module):
    """The second parameter is on one rank of two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (1031, 200, 1)
        self.parts = torch.nn.ParameterList(torch.randn(numel) for numel in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return sum((part.float().square().sum() for part in self.parts), x.float().sum())


def moments_of(sections: dict[str, Any], params: dict[str, Any]) -> list[Tensor]:
    model = Uneven()
    groups = [{"params": [model.parts[0], model.parts[2]]}, {"params": [model.parts[1]], "lr": 0.1}]
    settings = config(1, samples=1, params=params, **sections)
    engine = xds.initialize(model, settings, model_parameters=groups)
    engine.backward(engine(torch.ones(1)))
    engine.step()
    found = [xds.zero.get_full_optimizer_state(part, "exp_avg") for part in model.parts]
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("sections", "params", "dtype"),
    [
        ({"bf16": BF16}, {}, torch.float32),
        ({"bf16": STATES}, {}, torch.bfloat16),
        ({"bf16": BF16}, {"state_dtype": "int8"}, torch.float32),
    ],
)
def test_ranks_read_a_state_alike_where_one_has_no_part_of_it(
    sections: dict[str, Any], params: dict[str, Any], dtype: torch.dtype
) -> None:
    first, second = run_ranks(moments_of, 2, sections, params)
    for value, other in zip(first, second, strict=True):
        assert value.dtype == other.dtype == dtype and torch.equal(value, other)


def plans(half: dict[str, Any]) -> list[tuple[int, int, dict[str, int]]]:
    found = []
    for stage in (0, 1, 2, 3):
        engine = xds.initialize(build("plain"), given(stage, half))
        engine.backward(engine(micro_batch(0, 0)))
        plan = engine.memory_plan()
        engine.step()
        plan |= {key: engine.memory_plan()[key] for key in ("master", "optimizer")}
        numel = sum(unit.params[0].layout.numel for unit in engine._sharded.units)
        found.append((stage, numel, plan))
        engine.destroy()
    return found


@pytest.mark.parametrize(("half", "state_bytes"), [(BF16, 8), (STATES, 4), (FP16, 8)])
@pytest.mark.quick("half1-4")
def test_bytes_are_2_for_the_master_2_for_the_gradient_and_those_of_the_states(
    half: dict[str, Any], state_bytes: int
) -> None:
    world = 2
    for per_rank in run_ranks(plans, world, half):
        for stage, numel, plan in per_rank:
            part = numel // world
            assert plan["master"] == 0
            assert plan["optimizer"] - state_bytes * (part if stage else numel) in range(0, 64)
            assert plan["param"] == 2 * (part if stage == 3 else numel)


def test_what_cannot_round_its_masters_is_refused() -> None:
    for half, optimizer, need in (
        (BF16, "SGD", "only Adam, AdamW and Lion update"),
        ({**BF16, "enabled": False}, "AdamW", "needs bf16.enabled"),
        ({"enabled": True, "bf16_optimizer_states": True}, "AdamW", "needs bf16.bf16_master"),
    ):
        with pytest.raises(xds.ConfigError, match=need):
            xds.initialize(build("plain"), config(1, optimizer=optimizer, bf16=half))
    model = build("plain")
    with pytest.raises(xds.UsageError, match="16-bit masters"):
        torchs = torch.optim.AdamW(model.parameters())
        xds.initialize(model, {**config(1, bf16=BF16), "optimizer": None}, optimizer=torchs)
