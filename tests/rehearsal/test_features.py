"""Features beside the plain step on a CUDA device that is host memory: their numbers, and waits of the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from device_ranks import ranks  # the next module of this folder goes on with them, and ends them
from helpers import run_processes
from test_rehearsal import batch, build, config_of, waits
from torch import nn

pytestmark = pytest.mark.slow  # by default test_rehearsal, _offload, _decisions and _models run


def engine_of(stage: int, precision: str, accumulation: int = 1, **more: Any) -> Any:
    """An engine over the model of test_rehearsal. more: keys of the config."""
    import xds

    return xds.initialize(build(), config_of(stage, precision, accumulation) | more)


def inputs_of(engine: Any, number: int) -> Any:
    half = torch.bfloat16 if engine.config.bf16.enabled else torch.float16
    is_half = engine.config.bf16.enabled or engine.config.fp16.enabled
    return batch(number, engine.device, half if is_half else torch.float32)


def micro_batch(engine: Any, inputs: Any) -> Any:
    loss = engine(inputs).float().square().mean()
    engine.backward(loss)
    return loss.detach()


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        losses.append(micro_batch(engine, inputs_of(engine, number)))
        engine.step()
    return [loss.item() for loss in losses]


def counted(call: Callable[..., Any], *args: Any) -> int:
    """How often the host waits in `call`."""
    before = sum(waits().values())
    call(*args)
    return sum(waits().values()) - before


# -- states on the host -------------------------------------------------------------------------------------


def away_and_back(stage: int, precision: str, include: list[str] | None, pins: bool) -> Any:
    """Losses with and without the move, devices of the states while they are away, bytes of the device."""
    import xds
    from xds.zero.core.state_memory import StateMemory

    def devices(name: str) -> set[torch.device]:
        memory = StateMemory(engine._parts.updater)
        tensors = {
            "optim_states": memory.state_tensors,
            "lp_params": engine._parts.sharded.memory.param_tensors,
        }[name]
        return {
            torch.device("cpu") if is_moved else one.device
            for one in tensors()
            for is_moved in (engine._states.is_on_host(one),)
            if one.numel() and (is_moved or one.untyped_storage().nbytes())
        }

    engine = engine_of(stage, precision)
    undisturbed = train(engine, 0, 5)
    engine.destroy()
    engine = engine_of(stage, precision)
    losses = train(engine, 0, 2)
    weight = engine.module[0].weight
    here = [devices(name) for name in ("optim_states", "lp_params")]
    before, _ = torch.ops.host_cuda.memory()
    engine.offload_states(include=include, pin_memory=pins)
    freed = before - torch.ops.host_cuda.memory()[0]
    other = torch.full((freed // 4,), 7.0, device=engine.device)  # takes the memory
    away = [devices(name) for name in ("optim_states", "lp_params")]
    zeros = torch.zeros(weight.shape, device=engine.device)
    for access in (
        xds.zero.get_full_param,
        lambda param: xds.zero.set_full_param(param, zeros),
        lambda param: xds.zero.set_full_grad(param, zeros),
    ):
        with pytest.raises(xds.UsageError, match=r"offloaded: call reload_states\(\) first"):
            access(weight)
    del other
    engine.reload_states()
    assert here == [devices(name) for name in ("optim_states", "lp_params")]
    losses += train(engine, 2, 5)
    engine.destroy()
    return losses == undisturbed, [{each.type for each in one} for one in (*here, *away)], freed


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "include", "pins"),
    [
        (2, 3, "bf16", None, True),
        *(
            pytest.param(2, stage, precision, include, pins, marks=pytest.mark.slow)
            for stage, precision, include, pins in (
                (2, "bf16", ["optim_states"], True),
                (3, "fp32", ["optim_states"], False),
            )
        ),
    ],
)
def test_states_go_to_the_host_and_come_back_as_they_were(
    world_size: int, stage: int, precision: str, include: list[str] | None, pins: bool
) -> None:
    for same, places, freed in ranks(world_size).run(
        away_and_back, stage, precision, include, pins
    ):
        assert same and freed > 0
        params = "cpu" if include is None else "cuda"
        assert places == [{"cuda"}, {"cuda"}, {"cpu"}, {params}]


def loaded_modules() -> set[str]:
    engine = engine_of(3, "fp32")
    train(engine, 0, 2)
    engine.destroy()
    return {"torch._dynamo", "torch._inductor.compile_fx"} & set(sys.modules)


def test_training_without_compile_does_not_load_inductor() -> None:
    """It takes a second, and torch._dynamo.reset() loads it where there is a GPU."""
    assert ranks(2).run(loaded_modules) == [{"torch._dynamo"}] * 2


# -- measurements -------------------------------------------------------------------------------------------


def observed(stage: int, accumulation: int, section: dict[str, Any]) -> tuple[int, list[int]]:
    """How often the host waits in a step's micro-batches, and in five `step` after the first two."""
    engine = engine_of(stage, "bf16", accumulation, **section)
    in_micro_batches, in_steps = 0, []
    for step in range(7):
        for micro in range(accumulation):
            inputs = inputs_of(engine, step * accumulation + micro)
            in_micro_batches += counted(micro_batch, engine, inputs)
            in_steps.append(counted(engine.step))
    if "flops_profiler" in section:
        assert engine.flops_profile().macs > 0
    engine.destroy()
    return in_micro_batches // 7, in_steps[2 * accumulation :]


PROFILED = [0, 0, 1, 0, 0, 4] + [0, 0, 1] * 3


@pytest.mark.parametrize(
    ("section", "in_micro_batches", "in_steps"),
    [
        ({"csv_monitor": {"enabled": True, "output_path": "", "job_name": "j"}}, 0, [0, 0, 2] * 5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"steps_per_print": 2}, 0, [0, 0, 1, 0, 0, 2] * 2 + [0, 0, 1]),
                ({"memory_breakdown": True}, 0, [0, 0, 1] * 5),
                ({"comms_logger": {"enabled": True, "debug": True}}, 0, [0, 0, 1] * 5),
                ({"watch": {"heartbeat_seconds": 0.05, "notice_seconds": 0.1}}, 0, [0, 0, 1] * 5),
                ({"flops_profiler": {"enabled": True, "profile_step": 3}}, 0, PROFILED),
                ({"wall_clock_breakdown": True}, 9, [0, 0, 3] * 5),
            )
        ),
    ],
)
def test_a_measurement_waits_where_it_is_on(
    section: dict[str, Any], in_micro_batches: int, in_steps: list[int], tmp_path: Path
) -> None:
    for part in section.values():
        if isinstance(part, dict) and "output_path" in part:
            part["output_path"] = str(tmp_path)
    assert ranks(2).run(observed, 2, 3, section)[0] == (in_micro_batches, in_steps)


# -- overflow -----------------------------------------------------------------------------------------------


def overflowing(
    stage: int, *, accumulation: int, native: bool
) -> tuple[Any, list[float], int, int]:
    """After each step: scale, skipped steps, applied; the losses; waits in micro-batches and in steps."""
    config = config_of(stage, "fp16", accumulation) | {"ops": {"native": native}}
    config["fp16"] |= {"initial_scale_power": 12, "loss_scale_window": 3, "hysteresis": 1}
    engine = engine_of(stage, "fp16", accumulation, **{key: config[key] for key in ("fp16", "ops")})
    found, losses, in_micro_batches, in_steps = [], [], 0, 0
    for step in range(10):
        for micro in range(accumulation):
            inputs = inputs_of(engine, step * accumulation + micro)
            if step in (4, 5) and micro == 0:
                inputs[0, 0] = float("inf") if step == 4 else float("nan")
            before = sum(waits().values())
            losses.append(micro_batch(engine, inputs))
            in_micro_batches += sum(waits().values()) - before
            in_steps += counted(engine.step)
        found.append((engine.loss_scale, engine.skipped_steps, engine.was_step_applied()))
    engine.destroy()
    return found, [loss.item() for loss in losses], in_micro_batches, in_steps


@pytest.mark.parametrize(
    ("world_size", "stage", "accumulation", "native"),
    [
        (2, 2, 3, True),
        pytest.param(2, 3, 1, False, marks=pytest.mark.slow),
        pytest.param(1, 1, 3, True, marks=pytest.mark.slow),
    ],
)
def test_the_loss_scale_goes_down_and_up(
    world_size: int, stage: int, accumulation: int, native: bool
) -> None:
    run = partial(overflowing, accumulation=accumulation, native=native)
    plain = run_processes(
        partial(overflowing, accumulation=accumulation, native=False), world_size, stage
    )
    for number, found in enumerate(ranks(world_size, kernels=native).run(run, stage)):
        steps, losses, in_micro_batches, in_steps = found
        assert steps == plain[number][0]
        powers = [12, 12, 12, 13, 12, 11, 11, 11, 11, 12]
        assert [scale for scale, _, _ in steps] == [2.0**power for power in powers]
        assert losses == pytest.approx(plain[number][1], rel=1e-2, nan_ok=True)
        assert in_micro_batches == 0
        assert (
            in_steps == 10 + 1 + 2
        )  # the clock of samples a second starts; skipped steps compute the norm twice


# -- data of the engine -------------------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 46

    def __getitem__(self, at: int) -> Any:
        noise = torch.Generator().manual_seed(at)
        nested = {"number": torch.tensor(at), "list": [torch.ones(3)]}
        return {
            "x": torch.randn(24, generator=noise),
            "y": torch.randn(1, generator=noise),
            "rest": nested,
        }


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = build()

    def forward(self, x: Any, y: Any, rest: Any) -> Any:
        assert rest["number"].device == rest["list"][0].device == x.device
        found = self.net(x.to(self.net[0].weight.dtype)).float()
        return {"loss": (found[:, :1] - y).square().mean(), "found": found}


def whole_batches(stage: int, precision: str, accumulation: int) -> tuple[list[float], list[int]]:
    """Losses of train_batch and eval_batch over three epochs, and the waits of each after the first two."""
    import xds

    config = config_of(stage, precision, accumulation)
    engine = xds.initialize(WithLoss(), config, training_data=Samples())
    losses: list[Any] = []
    num_waits = []

    def one(call: Callable[..., Any], *args: Any) -> None:
        losses.append(call(*args))

    for step in range(9):
        num_waits.append(counted(one, engine.train_batch))
        if step % 4 == 3:
            num_waits.append(counted(one, engine.eval_batch, iter(engine.training_dataloader)))
    engine.destroy()
    return [loss.item() for loss in losses], num_waits[2:]


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "accumulation"),
    [
        (2, 3, "bf16", 2),
        pytest.param(1, 0, "bf16", 3, marks=pytest.mark.slow),
    ],
)
def test_batches_of_the_engines_loader_come_on_a_stream_of_their_own(
    world_size: int, stage: int, precision: str, accumulation: int
) -> None:
    plain = run_processes(whole_batches, world_size, stage, precision, accumulation)
    found = ranks(world_size).run(whole_batches, stage, precision, accumulation)
    for (losses, num_waits), (expected, _) in zip(found, plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 3e-2)
        assert num_waits == [
            1,
            1,
            0,
            1,
            1,
            1,
            1,
            0,
            1,
        ]  # the norm; none to evaluate, none for a batch
