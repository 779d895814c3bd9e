"""Checkpoints with MiCS: all ranks write, each element once; any number of ranks and any group size loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import load_at, resume_each, same, save_at, whole
from torch import Tensor, nn
from warm_ranks import warm

import xds

SLOW = pytest.mark.slow


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
        (1, of(1, 2), (3, 6)),
        (3, of(3, 2, **BF16, gradient_clipping=0.5), (3, 6)),
        (2, of(2, 2, **BF16, **STEPS), (4, 9)),  # in the middle of an accumulation
        pytest.param(1, of(1, 2, **BF16, **STEPS), (4, 9), marks=SLOW),
        pytest.param(3, of(3, 2, **STEPS), (4, 9), marks=SLOW),
        pytest.param(
            2, of(2, 2, fp16={"enabled": True, "initial_scale_power": 4}), (3, 6), marks=SLOW
        ),
        pytest.param(2, with_offload(2, offload_optimizer=CPU), (3, 6), marks=SLOW),
        pytest.param(
            3, with_offload(3, offload_optimizer=CPU, offload_param=CPU), (3, 6), marks=SLOW
        ),
    ],
)
def test_a_resumed_run_equals_the_one_that_never_stopped(
    tmp_path: Path, stage: int, more: dict[str, Any], numbers: tuple[int, int]
) -> None:
    warm(4).run(resume_each, str(tmp_path), [(stage, more, *numbers)])


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


LAYOUTS = [
    ((4, 2, 2), (2, 3, 0)),
    ((4, 3, 2), (4, 1, 4)),
    ((2, 3, 0), (4, 2, 2)),
    *(
        pytest.param(one, two, marks=SLOW)
        for one in ((4, 1, 2), (4, 3, 2), (4, 2, 1), (3, 1, 0))
        for two in ((4, 3, 2), (1, 0, 0), (2, 2, 0), (2, 1, 1), (4, 0, 2))
    ),
]


@pytest.mark.parametrize(("old", "new"), LAYOUTS)
def test_states_are_bit_equal_in_other_groups(
    tmp_path: Path, old: tuple[int, int, int], new: tuple[int, int, int]
) -> None:
    """Each is the number of ranks, the stage and mics_shard_size."""
    for precision in ({}, BF16):
        folder = str(tmp_path / ("bf16" if precision else "fp32"))
        saved = warm(old[0]).run(save_at, folder, old[1], of(*old[1:], **precision))
        loaded = warm(new[0]).run(load_at, folder, new[1], of(*new[1:], **precision))
        for states, (_, stage, size) in ((saved, old), (loaded, new)):
            if stage and size > 1:
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
    ranks = warm(4).run(save_large, str(tmp_path))
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


def in_a_mesh(folder: str, more: dict[str, Any], does_save: bool) -> Any:
    """The whole model after two steps and a save, or after a load; and the loss of the next step."""
    from feature_pairs import config_of
    from tensor_cases import batches, build

    config = config_of(()) | more
    engine = xds.initialize(build("llama"), config)
    if does_save:
        for step in range(2):
            engine.train_batch(batches("llama", step, engine.dp_rank))
        engine.save_checkpoint(folder, "here")
    else:
        engine.load_checkpoint(folder, "here")
    values = engine.full_state_dict(rank0_only=False, full_precision=True)
    loss = engine.train_batch(batches("llama", 2, engine.dp_rank)).item()
    engine.destroy()
    return values, loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "stage"),
    [({"pipeline": {"stages": 2}}, 1), ({"tensor_parallel": {"tp_size": 2}}, 3)],
)
def test_other_axes_are_saved_and_loaded(tmp_path: Path, axis: dict[str, Any], stage: int) -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    saved = warm(8).run(in_a_mesh, str(tmp_path), of(stage, 2) | axis, True)
    for world_size, more in ((8, of(stage, 2) | axis), (4, of(3, 2)), (4, of(2, 0))):
        for values, loss in warm(world_size).run(in_a_mesh, str(tmp_path), more, False):
            assert values.keys() == saved[0][0].keys()
            for name, value in values.items():
                assert torch.equal(value, saved[0][0][name]), name
            assert abs(loss - saved[0][1]) <= 1e-5 * loss
