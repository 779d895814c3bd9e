"""Optimizer states and parameters on the host or on a disk give the bits of a run without offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_ranks
from offload_runs import (
    AUTO,
    CPU,
    EVERYTHING,
    GUESS,
    HALF,
    OVERLAP,
    PARAMS,
    check,
    late_lanes,
    nvme,
    params_on,
)
from runs import config, differing
from torch import Tensor, nn

import xds

AUTO_LATER: dict[str, Any] = {
    "offload_optimizer": {**AUTO["offload_optimizer"], "overlap_step": True}
}
ON_DISK = "on a disk"  # stands for the folder of the test


def placed_in(folder: Path, offload: dict[str, Any]) -> dict[str, Any]:
    """`offload` with the folder of the test."""
    return {
        key: {**section, "nvme_path": str(folder)} if section["device"] == "nvme" else section
        for key, section in offload.items()
    }


DISK, HALF_DISK, LATER_DISK = (
    nvme(Path(ON_DISK), **more) for more in ({}, {"ratio": 0.5}, {"overlap_step": True})
)
GUESS_DISK = nvme(Path(ON_DISK), super_offload=True)
PARAMS_DISK, SOME_DISK = params_on(Path(ON_DISK)), params_on(Path(ON_DISK), keep=500)

# world_size, (stage, precision, accumulation), offloads
CASES: list[tuple[int, tuple[Any, ...], list[dict[str, Any]]]] = [
    (1, (2, "fp32", 1), [HALF, OVERLAP, GUESS, AUTO_LATER, DISK]),
    (1, (3, "fp16", 1), [PARAMS | CPU, PARAMS_DISK | DISK]),
    (2, (0, "bf16", 2), [CPU, GUESS, DISK]),
    (2, (1, "fp16", 1), [HALF, OVERLAP, DISK]),
    (2, (2, "bf16", 1), [CPU, AUTO, GUESS_DISK]),
    (2, (3, "fp32", 2), [PARAMS | HALF, DISK]),
    (2, (3, "bf16", 2), [PARAMS | GUESS, AUTO | PARAMS, SOME_DISK | CPU, PARAMS_DISK | HALF_DISK]),
]


@pytest.mark.parametrize(("world_size", "case", "offloads"), CASES)
def test_training_with_every_event_of_a_step(
    tmp_path: Path, world_size: int, case: tuple[Any, ...], offloads: list[dict[str, Any]]
) -> None:
    check(world_size, case, [placed_in(tmp_path, one) for one in offloads])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("optimizer", "stage", "precision", "offloads"),
    [
        ("Lion", 3, "bf16", [CPU | PARAMS, GUESS]),
        ("Muon", 3, "bf16", [CPU | PARAMS]),
        ("RMSprop", 1, "bf16", [CPU]),
        ("SGD", 1, "fp32", [DISK]),
        ("Lamb", 1, "bf16", [DISK]),
    ],
)
def test_other_optimizers(
    tmp_path: Path, optimizer: str, stage: int, precision: str, offloads: list[dict[str, Any]]
) -> None:
    case = (stage, precision, 1, optimizer)
    check(2, case, [placed_in(tmp_path, one) for one in offloads])


@pytest.mark.parametrize(
    ("feature", "world_size", "stage"),
    [("tied", 2, 2), ("checkpointed_reentrant", 1, 2), ("frozen", 2, 3), ("divergent", 2, 1)],
)
def test_gradients_that_arrive_twice_or_never(feature: str, world_size: int, stage: int) -> None:
    offloads = [PARAMS | GUESS] if stage == 3 else [OVERLAP, GUESS]
    check(world_size, (stage, "bf16", 2, "AdamW", feature), offloads)


@pytest.mark.parametrize(
    ("world_size", "case", "offloads"),
    [
        (1, (2, "fp32", 2), [OVERLAP, GUESS, HALF_DISK]),
        (2, (1, "bf16", 2), [CPU, LATER_DISK]),
        (2, (3, "bf16", 2), [CPU | PARAMS, GUESS | PARAMS, PARAMS_DISK | DISK]),
    ],
)
def test_copies_and_updates_that_are_as_late_as_they_may_be(
    tmp_path: Path, world_size: int, case: tuple[Any, ...], offloads: list[dict[str, Any]]
) -> None:
    check(world_size, case, [placed_in(tmp_path, one) for one in offloads], seed=0)


def test_masters_that_all_fit_the_device_leave_the_host_and_the_disk(tmp_path: Path) -> None:
    disk = nvme(tmp_path, ratio="auto")
    check(1, (2, "bf16", 2), [AUTO, AUTO_LATER, disk], spare_bytes=EVERYTHING)


class Skips(nn.Module):
    """Layers, of which some steps leave out one: its sum of zeros does not wait for the update."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) if at != left_out else x
        return x.float().square().mean()


def values_with_skips(offload: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = xds.initialize(Skips(), config(2, "bf16", zero=offload))
    for step in range(6):
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x.bfloat16(), step % 4))
        engine.step()
    found = engine.full_state_dict(rank0_only=False, full_precision=True)
    engine.destroy()
    return found


def test_a_late_update_reads_its_sum_before_the_next_one_replaces_it() -> None:
    wanted = run_ranks(values_with_skips, 2, {})
    for offload in (CPU, OVERLAP):
        with late_lanes(0):
            found = run_ranks(values_with_skips, 2, offload)
        assert not differing(found[0], wanted[0]), offload
