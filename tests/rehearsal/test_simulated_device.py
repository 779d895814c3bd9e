"""A device that is neither a CPU nor CUDA: "xsim" of stand_in.py.

Messages go through host memory, by gloo itself. Every number is that of the CPU to the last bit: ops of both
are the CPU's, and native ones are off, since other devices have none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from device_ranks import ranks
from helpers import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "contract"))
from same_bits import cases, train  # noqa: E402

STEPS = 3
DEFAULT = (
    "2 ranks, stage 2, fp32, host",
    "2 ranks, stage 3, bf16, accumulation 2",
)
MORE = (
    "2 ranks, stage 2, fp32, edits",
    "2 ranks, stage 2, fp32, host, accumulation",
    "2 ranks, stage 2, fp32, host, edits",
    "2 ranks, stage 2, fp32, host, freezing",
    "2 ranks, stage 3, fp32, reentrant",
    "2 ranks, stage 3, fp32, all on the host",
    "2 ranks, stage 3, fp32, all on the host, edits",
    "2 ranks, stage 3, fp32, all on the host, super",
    "2 ranks, stage 3, fp32, all on disk",
    "2 ranks, 1-bit Adam, stage 1",
    "2 ranks, ZeRO++, stage 2, fp32, host",
    "2 ranks, ZeRO++, stage 3, fp32",
    "2 ranks, ZeRO++, stage 3, fp32, host",
)


def results(names: list[str], folder: str) -> list[Any]:
    """Losses, norms and a digest of all states, by case; or the error of the case."""
    found = []
    for name in names:
        case = cases()[name][1]
        case["config"] = {"ops": {"native": False}, **case.get("config", {})}
        found.append(train(case, STEPS, folder))
    return found


def other_bits(names: list[str], device: str, folder: Path) -> list[str]:
    """Cases whose numbers on the device are not those of the CPU."""
    (world_size,) = {cases()[name][0] for name in names}
    there = ranks(world_size, device=device).run(results, names, str(folder))
    here = run_ranks(results, world_size, names, str(folder))
    found = []
    for number, name in enumerate(names):
        if [rank[number] for rank in there] != [rank[number] for rank in here]:
            found.append(f"{name}: {there[0][number]} and {here[0][number]}")
    return found


def test_training_has_the_bits_of_the_cpu(tmp_path: Path) -> None:
    assert other_bits([*DEFAULT], "xsim", tmp_path) == []


@pytest.mark.slow
def test_more_cases_of_the_contract_have_the_bits_of_the_cpu(tmp_path: Path) -> None:
    assert other_bits([*MORE], "xsim", tmp_path) == []
