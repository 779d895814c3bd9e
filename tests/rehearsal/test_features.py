"""Features beside the plain step on a CUDA device that is host memory: their numbers, and waits of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from device_ranks import ranks, stop_ranks
from test_rehearsal import batch, build, config_of, waits


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    yield
    stop_ranks()


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


def counted(call: Callable[[], Any]) -> int:
    """How often the host waits in `call`."""
    before = sum(waits().values())
    call()
    return sum(waits().values()) - before


# -- states on the host -------------------------------------------------------------------------------------


def away_and_back(stage: int, precision: str, include: list[str] | None, pins: bool) -> Any:
    """Losses with and without the move, devices of the states while they are away, bytes of the device."""
    import xds
    from xds.deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind
    from xds.deepspeed.runtime.zero.offload_states import get_state_devices

    engine = engine_of(stage, precision)
    undisturbed = train(engine, 0, 5)
    engine.destroy()
    engine = engine_of(stage, precision)
    losses = train(engine, 0, 2)
    weight = engine.module[0].weight
    here = [get_state_devices(engine, Kind(name)) for name in ("optim_states", "lp_params")]
    before, _ = torch.ops.host_cuda.memory()
    engine.offload_states(include=include, pin_memory=pins)
    freed = before - torch.ops.host_cuda.memory()[0]
    other = torch.full((freed // 4,), 7.0, device=engine.device)  # takes the memory
    away = [get_state_devices(engine, Kind(name)) for name in ("optim_states", "lp_params")]
    with pytest.raises(xds.UsageError, match=r"states are offloaded: call reload_states\(\) first"):
        xds.zero.get_full_param(weight)
    del other
    engine.reload_states()
    assert here == [get_state_devices(engine, Kind(name)) for name in ("optim_states", "lp_params")]
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
                (0, "fp32", None, True),
                (1, "fp16", None, False),
                (2, "bf16", ["optim_states"], True),
                (3, "fp32", ["optim_states"], False),
            )
        ),
        pytest.param(1, 0, "fp16", None, True, marks=pytest.mark.slow),
        pytest.param(1, 3, "fp32", None, True, marks=pytest.mark.slow),
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


# -- measurements -------------------------------------------------------------------------------------------


def observed(stage: int, accumulation: int, section: dict[str, Any]) -> tuple[int, list[int]]:
    """How often the host waits in a step's micro-batches, and in five `step` after the first two."""
    engine = engine_of(stage, "bf16", accumulation, **section)
    in_micro_batches, in_steps = 0, []
    for step in range(7):
        for micro in range(accumulation):
            inputs = inputs_of(engine, step * accumulation + micro)
            in_micro_batches += counted(partial(micro_batch, engine, inputs))
            in_steps.append(counted(engine.step))
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
