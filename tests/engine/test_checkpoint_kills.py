"""SIGKILL at random instants of save loops: what was saved is found, whole, and goes on. The long form, and
its figures: benchmarks/checkpoint/kills.py."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "checkpoint"))
from kill_runs import Killer, Scenario, Tally  # noqa: E402

KILLS = 4
SCENARIOS = [
    Scenario(stage=3, victims="all", keep_last=2),
    Scenario(stage=2, victims="one", same_tag=True),
    Scenario(stage=3, victims="one", keep_last=2, async_save=True),
    Scenario(stage=2, victims="all", same_tag=True, async_save=True, width=128),
]


def kill_often(scenario: Scenario, seed: int) -> Tally:
    killer = Killer(scenario, seed, window_seconds=0.15)
    for _ in range(KILLS):
        killer.trial()
    return killer.finish()


@pytest.mark.slow
def test_no_kill_loses_or_tears_a_checkpoint() -> None:
    # side by side: a rank whose peer was killed waits three seconds for what the peer may have to say
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        tallies = list(pool.map(kill_often, SCENARIOS, range(len(SCENARIOS))))
    assert [problem for tally in tallies for problem in tally.problems] == []
    assert sum(tally.inside for tally in tallies) > 0
