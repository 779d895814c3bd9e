"""A checkpoint that contradicts itself is refused before anything changes, by verify and load alike."""

from __future__ import annotations

from pathlib import Path

from helpers import run_ranks
from manifest_trials import try_often

TRIALS = 45


def test_what_contradicts_itself_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    for found in run_ranks(try_often, 2, str(tmp_path), TRIALS, 11):
        assert found["problems"] == []
        assert sum(found["outcomes"].values()) == TRIALS
        assert {one.split(": ")[1] for one in found["outcomes"]} >= {"refused", "loaded"}
