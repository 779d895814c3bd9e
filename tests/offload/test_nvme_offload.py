"""Tests: masters and optimizer states in a file give the bits of a run without offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import offload_runs
import pytest
from offload_runs import PARAMS, check_equal
from warm_ranks import warm

STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16", "fp16")


def nvme(folder: Path, **more: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder), **more}}


def check(
    world_size: int, case: tuple[Any, ...], offloads: list[dict[str, Any]], seed: int | None = None
) -> None:
    """case: stage, precision, accumulation, optimizer, model."""
    stage, precision, accumulation, *rest = case
    ranks = warm(world_size)
    plain = ranks.run(offload_runs.train, stage, precision, accumulation, None, *rest)
    for offload in offloads:
        run = (offload_runs.train,) if seed is None else (offload_runs.train_late, seed)
        found = ranks.run(*run, stage, precision, accumulation, offload, *rest)
        for one, other in zip(plain, found, strict=True):
            check_equal(one, other)


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "accumulation"),
    [(1, 0, "fp32", 1), (2, 0, "bf16", 2), (2, 1, "fp16", 1), (2, 2, "bf16", 1), (2, 3, "fp32", 2)],
)
def test_the_same_bits(
    tmp_path: Path, world_size: int, stage: int, precision: str, accumulation: int
) -> None:
    check(world_size, (stage, precision, accumulation), [nvme(tmp_path)])
    assert not list(tmp_path.iterdir())
