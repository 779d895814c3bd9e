"""Checkpoints between any two places of the states, at the end of a step and in the middle of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import build, micro_batch
from offload_runs import CPU, HALF, PARAMS, SAMPLES, config_of, nvme, params_on
from runs import differing

import xds

ACCUMULATION, STEPS = 3, 3
PLAIN: dict[str, Any] = {}


def train(engine: xds.Engine, done: range) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for at in done:
        step, micro_step = divmod(at, ACCUMULATION)
        part = micro_batch(step, micro_step, SAMPLES).chunk(world_size)[rank]
        engine.backward(engine(part, rank))
        engine.step()


def engine_of(stage: int, precision: str, offload: dict[str, Any], feature: str) -> xds.Engine:
    config = config_of(stage, precision, ACCUMULATION, offload, "AdamW")
    return xds.initialize(build(feature), config)


def numbers(engine: xds.Engine) -> list[torch.Tensor]:
    norm = torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)
    values = engine.full_state_dict(rank0_only=False, full_precision=True)
    engine.destroy()
    return [norm, *values.values()]


def continue_each(
    folder: str, case: tuple[int, str, str], at: int, pairs: list[tuple[Any, Any]]
) -> list[str]:
    """The pairs (saved with, loaded with) that differ from a run that was not interrupted."""
    stage, precision, feature = case
    engine = engine_of(stage, precision, PLAIN, feature)
    train(engine, range(STEPS * ACCUMULATION))
    expected = numbers(engine)
    differing = []
    for number, (saved, loaded) in enumerate(pairs):
        engine = engine_of(stage, precision, saved, feature)
        train(engine, range(at))
        engine.save_checkpoint(f"{folder}/{case}{at}{number}")
        engine.destroy()
        engine = engine_of(stage, precision, loaded, feature)
        train(engine, range(2 * ACCUMULATION))  # states of its own, which are replaced
        engine.load_checkpoint(f"{folder}/{case}{at}{number}")
        train(engine, range(at, STEPS * ACCUMULATION))
        found = numbers(engine)
        if not all(map(torch.equal, expected, found)):
            differing.append(f"{saved} -> {loaded}")
    return differing


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "feature", "pairs"),
    [
        (1, 2, "bf16", "reused", [(PLAIN, HALF), (HALF, CPU), (CPU, PLAIN)]),
        (2, 1, "bf16", "divergent", [(PLAIN, CPU), (CPU, PLAIN)]),
        (2, 3, "bf16", "plain", [(PLAIN, CPU | PARAMS), (CPU | PARAMS, CPU), (CPU, PLAIN)]),
    ],
)
@pytest.mark.quick("1-2-bf16-reused-pairs0")
def test_a_step_goes_on_in_its_middle(
    tmp_path: Path, world_size: int, stage: int, precision: str, feature: str, pairs: Any
) -> None:
    case = (stage, precision, feature)
    found = run_ranks(continue_each, world_size, str(tmp_path), case, 5, pairs)
    assert found == [[]] * world_size


def save_and_load(
    offload: dict[str, Any] | None, folder: str, source: str, async_save: bool = False
) -> dict[str, Any]:
    """Load `source` if there is one, take a step, save to `folder`; what a second engine finds there."""
    config = config_of(1, "bf16", 1, offload, "AdamW")
    config["checkpoint"] = {"async_save": async_save}
    engine = xds.initialize(build("plain"), config)
    if source:
        engine.load_checkpoint(source)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        part = micro_batch(step, 0, SAMPLES).chunk(world_size)[rank]
        engine.backward(engine(part, rank))
        engine.step()
    engine.save_checkpoint(folder)
    param = next(p for p in engine.module.parameters() if p.numel() > 1)
    found = {
        "values": engine.full_state_dict(rank0_only=False, full_precision=True),
        "states": {"exp_avg": xds.zero.get_full_optimizer_state(param, "exp_avg")},
        "steps": engine.global_steps,
    }
    engine.destroy()
    return found


def test_checkpoints_go_from_any_place_to_any_place(tmp_path: Path) -> None:
    disk = nvme(tmp_path / "disk")
    places: dict[str, dict[str, Any] | None] = {"none": None, "cpu": CPU, "nvme": disk}
    for name, place in places.items():
        run_ranks(save_and_load, 2, place, str(tmp_path / name), "", name == "nvme")
    expected = run_ranks(save_and_load, 2, None, str(tmp_path / "again"), str(tmp_path / "none"))[0]
    for source, place in (("none", disk), ("cpu", disk), ("nvme", CPU), ("nvme", None)):
        target = str(tmp_path / "again")
        found = run_ranks(save_and_load, 2, place, target, str(tmp_path / source))[0]
        for kind in ("values", "states"):
            assert not differing(found[kind], expected[kind]), (source, place, kind)
        assert found["steps"] == 4
    found = run_ranks(save_and_load, 1, disk, target, str(tmp_path / "nvme"))[0]  # on fewer ranks
    assert found["steps"] == 4


def resume(offload: dict[str, Any], folder: str, feature: str) -> dict[str, Any]:
    """Save, and load into a new engine with other values."""
    engines = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        engine = xds.initialize(build(feature), config_of(3, "bf16", 1, offload, "AdamW"))
        for step in range(2 + seed):
            rank, world_size = dist.get_rank(), dist.get_world_size()
            part = micro_batch(step, seed, SAMPLES).chunk(world_size)[rank]
            engine.backward(engine(part, rank))
            engine.step()
        engines.append(engine)
    saved, loaded = engines
    saved.save_checkpoint(folder)
    loaded.load_checkpoint(folder)
    values = [engine.full_state_dict(rank0_only=False, full_precision=True) for engine in engines]
    computed = [engine.full_state_dict(rank0_only=False) for engine in engines]
    for one, other in (values, computed):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name
    for engine in engines:
        engine.destroy()
    return computed[0]


def test_a_checkpoint_of_parameters_on_a_disk(tmp_path: Path, feature: str = "frozen") -> None:
    disk = nvme(tmp_path / "disk") | params_on(tmp_path / "disk")
    found = run_ranks(resume, 2, disk, str(tmp_path / "one"), feature)[0]
    plain = run_ranks(resume, 2, CPU | PARAMS, str(tmp_path / "two"), feature)[0]
    for name, value in plain.items():
        assert torch.equal(value, found[name]), name
