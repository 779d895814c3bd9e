"""Checkpoints of slices: what a load reads, and steps that continue after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_processes, run_ranks
from pipeline_checkpoints import Cut, config_of, engine_of, samples
from torch import Tensor, nn

import xds
from xds.engine.checkpoint.io.checked_file import CheckedFile

WIDTH, LAYERS = 768, 2


def wide(cut: Cut, word: str) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    plan = {str(layer): word for layer in range(LAYERS)}
    config = config_of(cut, tensor_parallel={"tp_size": cut.tensor, "plan": plan})
    return xds.initialize(model, config)


def save_wide(folder: str, cut: Cut, word: str) -> None:
    engine = wide(cut, word)
    engine.save_checkpoint(folder, word)
    engine.destroy()


def bytes_read(folder: str, cut: Cut, word: str) -> int:
    """What this rank reads of the files for their check, without the second read from the page cache."""
    engine = wide(cut, word)
    total = 0
    check = CheckedFile.read

    def counted(self: CheckedFile, copies: Any, *, sums: bool = True) -> None:
        nonlocal total
        before = self.read_bytes
        check(self, copies, sums=sums)
        total += self.read_bytes - before if sums else 0

    CheckedFile.read = counted  # type: ignore[method-assign]
    try:
        engine.load_checkpoint(folder, word)
    finally:
        CheckedFile.read = check  # type: ignore[method-assign]
    engine.destroy()
    return total


@pytest.mark.parametrize("saved", [Cut(1, 1, 0), Cut(1, 1, 1, tensor=4)], ids=lambda cut: cut.tag)
def test_a_rank_reads_its_columns_or_whole_rows(tmp_path: Path, saved: Cut) -> None:
    whole = 4 * LAYERS * WIDTH * WIDTH
    for word, most in (
        ("colwise_gather_output", 1.1 * whole / 2),
        ("rowwise_split_input", 1.02 * whole),
    ):
        run_ranks(save_wide, saved.world_size, str(tmp_path), saved, word)
        for found in run_processes(bytes_read, 2, str(tmp_path), Cut(1, 1, 1, tensor=2), word):
            assert 0.99 * whole / 2 < found <= most, word


def half_a_step(folder: str, cut: Cut, is_loaded: bool) -> list[Tensor]:
    """Weights after two steps; with a save or a load in the middle of the second."""
    engine = engine_of(cut, seed=4, gradient_accumulation_steps=2, scheduler=None)
    pairs = samples()
    at = 2 * engine.dp_rank
    batches = [
        [torch.stack(side) for side in zip(*pairs[at + n : at + n + 2], strict=True)]
        for n in range(4)
    ]
    if is_loaded:
        engine.load_checkpoint(folder)
    for number, batch in enumerate(batches):
        if is_loaded and number < 3:
            continue
        engine.backward(engine(*batch))
        engine.step()
        if number == 2:
            engine.save_checkpoint(folder)
    found = list(engine.full_state_dict(rank0_only=False, full_precision=True).values())
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_half_a_step_continues(tmp_path: Path, stage: int) -> None:
    cut = Cut(1, 2, stage, tensor=2)
    straight = run_ranks(half_a_step, 4, str(tmp_path), cut, False)
    loaded = run_ranks(half_a_step, 4, str(tmp_path), cut, True)
    for one, two in zip(straight, loaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
