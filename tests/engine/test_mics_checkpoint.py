"""Checkpoints with MiCS: all ranks write, each element once; any number of ranks and any group size loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import load_at, resume_each, same, save_at, whole
from helpers import run_ranks
from torch import Tensor, nn

import xds


def of(stage: int, size: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "unit_min_numel": 0, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": zero | ({"mics_shard_size": size} if size else {}), **more}


BF16 = {"bf16": {"enabled": True}}
STEPS = {"gradient_accumulation_steps": 3}
CPU = {"device": "cpu"}


def with_offload(stage: int, **offload: Any) -> dict[str, Any]:
    config = of(stage, 2, **BF16)
    config["zero_optimization"] |= offload
    return config


@pytest.mark.parametrize(
    ("stage", "more", "numbers"),
    [
        (3, of(3, 2, **BF16, gradient_clipping=0.5), (3, 6)),
        (2, of(2, 2, **BF16, **STEPS), (4, 9)),  # in the middle of an accumulation
        (3, with_offload(3, offload_optimizer=CPU, offload_param=CPU), (3, 6)),
    ],
)
def test_a_resumed_run_equals_the_one_that_never_stopped(
    tmp_path: Path, stage: int, more: dict[str, Any], numbers: tuple[int, int]
) -> None:
    run_ranks(resume_each, 4, str(tmp_path), [(stage, more, *numbers)])


def check_replicas(states: list[Any], size: int) -> None:
    """Ranks with one shard have the same bits of what is trained; step counts are written by one of them."""
    for rank, found in enumerate(states):
        first = states[rank % size]
        trained = {name for name, key in first if key == "state/exp_avg"}
        places = [place for place in first if place[0] in trained and place[1] != "state/step"]
        assert trained and set(places) <= found.keys()
        for place in places:
            parts = found[place]
            for (start, one), (other_start, two) in zip(parts, first[place], strict=True):
                assert start == other_start and torch.equal(one, two), place


@pytest.mark.parametrize(
    ("old", "new", "precision"),
    [
        ((4, 2, 2), (2, 3, 0), {}),
        ((4, 3, 2), (4, 1, 4), BF16),
    ],
)
def test_states_are_bit_equal_in_other_groups(
    tmp_path: Path, old: tuple[int, int, int], new: tuple[int, int, int], precision: Any
) -> None:
    """Each is the number of ranks, the stage and mics_shard_size."""
    saved = run_ranks(save_at, old[0], str(tmp_path), old[1], of(*old[1:], **precision))
    loaded = run_ranks(load_at, new[0], str(tmp_path), new[1], of(*new[1:], **precision))
    for states, (_, _, size) in ((saved, old), (loaded, new)):
        if size > 1:
            check_replicas(states, size)
    same(whole(saved), whole(loaded))


def save_large(folder: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700), nn.Linear(700, 3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "unit_min_numel": 0, "mics_shard_size": 2},
    }
    engine = xds.initialize(model, config)
    engine.backward(engine(torch.randn(2, 700)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, "here")
    values: dict[str, Tensor] = engine.full_state_dict(full_precision=True)
    engine.destroy()
    return values


def test_a_save_is_spread_over_all_ranks_and_each_element_is_written_once(tmp_path: Path) -> None:
    ranks = run_ranks(save_large, 4, str(tmp_path))
    assert [bool(values) for values in ranks] == [True, False, False, False]
    text = (tmp_path / "here" / "manifest.json").read_text()
    manifest = json.loads(text)
    numels = [flat["numel"] for flat in manifest["flats"]]
    for key in ("value", "state/exp_avg"):
        by_flat: list[list[tuple[int, int]]] = [[] for _ in numels]
        by_rank = [0] * 4
        for rank, record in enumerate(manifest["files"]):
            for one in record["ranges"]:
                if one["key"] == key:
                    by_flat[one["flat"]].append((one["start"], one["stop"]))
                    by_rank[rank] += one["stop"] - one["start"]
        for found, numel in zip(by_flat, numels, strict=True):
            ends = [0, *(stop for _, stop in sorted(found))]
            assert [start for start, _ in sorted(found)] == ends[:-1] and ends[-1] == numel
        assert min(by_rank) > 0.24 * sum(numels)
    loaded = xds.get_fp32_state_dict(str(tmp_path), "here")
    for name, value in ranks[0].items():
        assert torch.equal(loaded[name], value)
