"""The section autotuning in a run: some steps are timed, written, and the run ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import run_ranks
from models import build, micro_batch
from torch.utils.flop_counter import FlopCounterMode

import xds


def train(path: str, section: dict[str, object]) -> int:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "autotuning": {"enabled": True, "metric_path": path, "model_info_path": path, **section},
    }
    engine = xds.initialize(build("tied"), config)
    steps = 0
    try:
        while steps < 20:
            loss = engine(micro_batch(steps, 0, 2))
            engine.backward(loss)
            engine.step()
            steps += 1
    except SystemExit as end:
        assert end.code == 0
    return steps


def test_steps_are_timed_by_the_wall_and_every_rank_ends_alike(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.json"
    steps = run_ranks(train, 2, str(path), {"start_profile_step": 1, "end_profile_step": 4})
    assert steps == [3, 3]  # the fourth did not return
    metrics = json.loads(path.read_text())
    assert metrics["throughput"] == pytest.approx(4 / (metrics["latency"] / 1000))
    assert metrics["train_batch_size"] == 4 and metrics["peak_bytes"] > 0


def test_operations_are_those_of_the_forward_three_times(tmp_path: Path) -> None:
    path, section = tmp_path / "metrics.json", {"metric": "flops", "start_profile_step": 1}
    run_ranks(train, 2, str(path), section | {"end_profile_step": 2})
    metrics = json.loads(path.read_text())
    with FlopCounterMode(display=False) as counter:
        build("tied")(micro_batch(0, 0, 2))
    wanted = 3 * counter.get_total_flops() / (metrics["latency"] / 1000)
    assert metrics["FLOPS_per_gpu"] == pytest.approx(wanted)


def test_the_model_is_described_after_the_first_forward(tmp_path: Path) -> None:
    path = tmp_path / "model_info.json"
    assert run_ranks(train, 2, str(path), {"model_info": {"profile": True}}) == [0, 0]
    info = json.loads(path.read_text())
    numel = sum(param.numel() for param in build("tied").parameters())
    assert info["num_params"] == numel and info["activation_mem_per_gpu"] > 0


def test_steps_in_the_wrong_order_are_refused() -> None:
    section = {"enabled": True, "start_profile_step": 5, "end_profile_step": 5}
    with pytest.raises(xds.ConfigError, match="autotuning.end_profile_step = 5"):
        xds.Config.load({"train_batch_size": 1, "autotuning": section})
