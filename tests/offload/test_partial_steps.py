"""Tests: a checkpoint in the middle of an accumulation continues with and without offload, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import build, micro_batch
from offload_runs import CPU, HALF, OVERLAP, PARAMS, SAMPLES, config_of
from thinned import pairwise

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


def check(
    folder: Path, world_size: int, case: tuple[int, str, str], ats: tuple[int, ...], *homes: Any
) -> None:
    pairs = [pair for pair in itertools.product((PLAIN, *homes), repeat=2) if pair[0] != pair[1]]
    for at in ats:
        found = run_ranks(continue_each, world_size, str(folder), case, at, pairs)
        assert found == [[]] * world_size, (world_size, case, at)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank(tmp_path: Path, precision: str) -> None:
    check(tmp_path, 1, (2, precision, "reused"), (5,), CPU, HALF)


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks(tmp_path: Path, stage: int) -> None:
    check(tmp_path, 2, (stage, "bf16", "plain"), (5,), CPU)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "stage", "precision"),
    pairwise(
        (("plain", 1), ("checkpointed_reentrant", 1), ("divergent", 2)),  # feature, world_size
        (0, 1, 2, 3),
        ("fp32", "bf16", "fp16"),
    ),
)
def test_combinations(tmp_path: Path, model: tuple[str, int], stage: int, precision: str) -> None:
    feature, world_size = model
    homes = (CPU, PARAMS | CPU) if stage == 3 else (HALF, OVERLAP)
    check(tmp_path, world_size, (stage, precision, feature), (4,), *homes)
