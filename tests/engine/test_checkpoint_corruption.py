"""A damaged checkpoint is refused by the name of its file, on every rank, and the one before it is taken on
request."""

from __future__ import annotations

from pathlib import Path

from corruption_trials import corrupt_often
from helpers import run_ranks

TRIALS = 100


def test_every_damage_is_refused_by_file_and_fallen_back_from(tmp_path: Path) -> None:
    for found in run_ranks(corrupt_often, 2, str(tmp_path), TRIALS, 1):
        assert found["problems"] == []
        assert sum(found["outcomes"].values()) == TRIALS
        assert {one.split(",")[0] for one in found["outcomes"]} == {
            *("flip", "truncate", "swap", "delete", "foreign")
        }
