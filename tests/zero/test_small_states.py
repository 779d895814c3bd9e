"""Optimizer states of fewer bits than fp32 have the same bits at every stage and place, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_ranks
from models import build, micro_batch
from pipeline_runs import Model, batches, config_of
from rounded_runs import DECAY, EPS, SEED, STEPS, of_world
from runs import config, differing
from torch import Tensor
from torch.nn import functional as F

import xds
from xds.engine.config.config import parse_config
from xds.ops.coded import BLOCK_NUMEL, new_codes
from xds.ops.flat import align_up
from xds.ops.kernels.adam import adam_
from xds.ops.kernels.lion import lion_
from xds.ops.libraries import load
from xds.ops.rounding import draw_rows

BF16 = {"bf16": {"enabled": True, "rounding_seed": SEED}}
NARROW = {"bf16": {**BF16["bf16"], "bf16_master_weights_and_grads": True}}
FP32: dict[str, Any] = {}


def given(
    stage: int,
    states: str,
    half: dict[str, Any],
    zero: dict[str, Any] | None = None,
    optimizer: str = "AdamW",
) -> dict[str, Any]:
    params: dict[str, Any] = {"weight_decay": DECAY, "state_dtype": states}
    if optimizer == "AdamW":
        params["eps"] = EPS
    return config(stage, samples=4, zero=zero, optimizer=optimizer, params=params, **half)


def new_states(states: str, numel: int, optimizer: str) -> list[Tensor]:
    kinds = (False, True) if optimizer == "AdamW" else (False,)
    if states == "bf16":
        return [torch.zeros(numel, dtype=torch.bfloat16) for _ in kinds]
    return [new_codes(numel, torch.device("cpu"), of_squares=squares) for squares in kinds]


def in_a_loop(states: str, half: dict[str, Any], optimizer: str) -> dict[str, Tensor]:
    """The same by autograd and one call of the kernel for each parameter."""
    load("cpu")
    is_bf16, is_narrow = bool(half), half is NARROW
    seed = SEED if half else 0
    model = build("tied").to(torch.bfloat16 if is_bf16 else torch.float32)
    params = dict(model.named_parameters())
    masters = {
        name: F.pad(param.data.reshape(-1).float(), (0, -param.numel() % BLOCK_NUMEL))
        for name, param in params.items()
    }
    padded = {name: align_up(param.numel(), BLOCK_NUMEL) for name, param in params.items()}
    moments = {name: new_states(states, numel, optimizer) for name, numel in padded.items()}
    for step in range(STEPS):
        model(micro_batch(step, 0)).backward()
        for name, param in params.items():
            numel, grad = param.numel(), param.grad
            assert grad is not None
            flat, grad = (F.pad(t.view(-1), (0, padded[name] - numel)) for t in (param.data, grad))
            master = masters[name] if is_bf16 and not is_narrow else flat
            count, draws = torch.tensor(step + 1.0), draw_rows([(0, numel, 0, name)], seed)
            tensors = (master, grad, *moments[name], None if master is flat else flat)
            rounding = {"draws": draws, "rounds_away": is_bf16}
            if optimizer == "AdamW":
                constants = (1e-2, 0.9, 0.999, EPS, DECAY, True, True)
                adam_(*tensors, count, None, None, *constants, **rounding)
            else:
                constants = (1e-2, 0.9, 0.999, DECAY)
                lion_(*tensors, None, None, *constants, step=count, **rounding)
            param.data.view(-1).copy_(flat[:numel])
            param.grad = None
    return {name: param.data for name, param in params.items()}


@pytest.mark.parametrize(
    ("states", "half", "world", "optimizer"),
    [
        ("bf16", BF16, 2, "AdamW"),
        ("bf16", FP32, 4, "AdamW"),
        ("int8", BF16, 1, "AdamW"),
        ("int8", FP32, 2, "AdamW"),
        ("int8", NARROW, 2, "AdamW"),
        ("int8", NARROW, 4, "AdamW"),
        ("int8", BF16, 2, "Lion"),
    ],
)
@pytest.mark.quick("int8-half2-1-AdamW", "int8-half6-2-Lion", "bf16-half0-2-AdamW")
def test_ranks_stages_places_and_resumes_change_no_bit(
    states: str, half: dict[str, Any], world: int, optimizer: str, tmp_path: Path
) -> None:
    wanted = in_a_loop(states, half, optimizer)
    case_of = lambda stage, zero: given(stage, states, half, zero, optimizer)  # noqa: E731
    for per_rank in run_ranks(of_world, world, case_of, str(tmp_path)):
        for name, found in per_rank.items():
            for key, value in wanted.items():
                same = found[key].reshape(-1).to(value.dtype)
                assert torch.equal(same, value.reshape(-1)), (name, key)


def in_stages(stages: int, schedule: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    states = {"optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-2}}}
    case = config_of(stages, 2, zero={"stage": 1, "unit_min_numel": 0}, pipeline=schedule, **states)
    engine = xds.initialize(Model(), case)
    for step in range(STEPS):
        engine.train_batch(iter(batches(step, engine.dp_rank, 2)))
    found = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return found


def test_stages_of_a_pipeline_change_no_bit() -> None:
    wanted = run_ranks(in_stages, 1, 1, {})[0]
    for found in run_ranks(in_stages, 2, 2, {"schedule": "1f1b"}):
        assert not differing(found, wanted)


def across(first: str, then: str, folder: str) -> dict[str, Any]:
    """Save with the states `first` and load with `then`, in another stage and other precision of masters."""
    engine = xds.initialize(build("tied"), given(3, first, BF16))
    for step in range(2):
        engine.backward(engine(micro_batch(step, 0)))
        engine.step()
    engine.save_checkpoint(folder)
    saved = states_in(engine)
    engine.destroy()
    engine = xds.initialize(build("tied"), given(1, then, NARROW))
    engine.load_checkpoint(folder)
    loaded = states_in(engine)
    dtypes = {t.dtype for s in engine.optimizer.state.values() for t in s.values() if t.dim()}
    engine.backward(engine(micro_batch(2, 0)))
    engine.step()
    engine.destroy()
    return {"saved": saved, "loaded": loaded, "dtypes": dtypes}


def states_in(engine: Any) -> dict[str, Tensor]:
    return {
        f"{name} {key}": xds.zero.get_full_optimizer_state(param, key)
        for name, param in engine.module.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize(
    ("first", "then"), [("int8", "fp32"), ("int8", "bf16"), ("bf16", "int8"), ("fp32", "int8")]
)
def test_a_checkpoint_of_any_states_loads_into_others(
    first: str, then: str, tmp_path: Path
) -> None:
    dtypes = {
        "fp32": {torch.float32},
        "bf16": {torch.bfloat16},
        "int8": {torch.int8, torch.uint8},
    }
    for found in run_ranks(across, 2, first, then, str(tmp_path)):
        assert found["dtypes"] == dtypes[then]
        for name, value in found["saved"].items():
            value, loaded = value.float(), found["loaded"][name].float()
            if first == "int8":
                assert torch.equal(loaded, value), name
            near = value.abs() > value.abs().max() * 2.0**-12
            assert torch.allclose(loaded[near], value[near], rtol=0.07, atol=0), name
            assert value.abs().sum() > 0


def used(stage: int) -> dict[str, Any]:
    """States that are read and written, frozen parts, and bytes."""
    engine = xds.initialize(build("tied"), given(stage, "int8", NARROW))
    plan = engine._sharded.memory.expected_bytes(2)
    params = dict(engine.module.named_parameters())
    (name, param) = next(iter(params.items()))
    for step in range(2):
        engine.backward(engine(micro_batch(step, 0)))
        if step == 1:
            before = states_in(engine)
            others = [p for n, p in params.items() if n != name]
            for other in others:
                other.requires_grad_(False)
        engine.step()
    after = states_in(engine)
    wanted = 2.0 ** torch.arange(-8, 8).repeat(-(-param.numel() // 16))[: param.numel()]
    shape = before[f"{name} exp_avg"].shape
    wanted = wanted.view(shape) if wanted.numel() == shape.numel() else torch.ones(shape)
    xds.zero.set_full_optimizer_state(param, wanted, "exp_avg_sq")
    read = xds.zero.get_full_optimizer_state(param, "exp_avg_sq")
    actual = engine.memory_plan()
    engine.destroy()
    return {
        "frozen": all(torch.equal(after[key], before[key]) == (name not in key) for key in before),
        "same": torch.equal(read, wanted),
        "plan": plan[0],
        "actual": actual["param"] + actual["optimizer"] + actual["master"],
        "numel": sum(unit.params[0].layout.numel for unit in engine._sharded.units),
    }


def test_states_of_8_bits_are_read_written_frozen_and_counted() -> None:
    world = 2
    for stage in (0, 1, 2, 3):
        for found in run_ranks(used, world, stage):
            assert found["frozen"], stage
            assert found["same"], stage
            numel, part = found["numel"], found["numel"] // world
            state_bytes = 2 * (part if stage else numel) * 260 // 256
            params = 2 * (part if stage == 3 else numel)
            assert found["actual"] - params - state_bytes in range(64), stage
            # and gradients in 16 bits
            assert found["plan"] == params + state_bytes + 2 * (part if stage >= 2 else numel)


def test_what_cannot_keep_small_states_is_refused() -> None:
    model = build("plain")
    case = given(1, "int8", BF16)
    with pytest.raises(xds.UsageError, match="pass no optimizer"):
        xds.initialize(model, case, optimizer=torch.optim.AdamW(model.parameters()))
    case["optimizer"]["type"] = "SGD"
    with pytest.raises(xds.ConfigError, match="state_dtype"):
        xds.initialize(model, case)
    case["bf16"] = {**NARROW["bf16"], "bf16_optimizer_states": True}
    case["optimizer"]["type"] = "AdamW"
    with pytest.raises(xds.ConfigError, match="remove one of the two keys"):
        xds.initialize(model, case)
    with pytest.raises(xds.ConfigError, match="AdamW8bit means int8; choose AdamW"):
        parse_config(config(optimizer="AdamW8bit", params={"state_dtype": "fp32"}))


def test_names_of_other_libraries_mean_states_of_8_bits() -> None:
    for name, kind in (
        *(("AdamW8bit", "AdamW"), ("adam8bit", "Adam"), ("adamw_bnb_8bit", "AdamW")),
        *(("paged_adamw_8bit", "AdamW"), ("PagedAdam8bit", "Adam")),
        *(("Lion8bit", "Lion"), ("PagedLion8bit", "Lion")),
    ):
        case = parse_config(config(1, optimizer=name))
        assert (case.optimizer.type, case.state_dtype) == (kind, "int8")
