"""Tests of finding slow ranks: from tables of step times, and in a run where one rank sleeps in every step."""

from __future__ import annotations

import logging
import random
import time

import pytest
import torch.distributed as dist
from helpers import run_new_ranks
from stalled_runs import Lines, engine_of, one_step

from xds.ops.watch.stragglers import SpeedChange, Steps, StragglerDetector

STEP_SECONDS = 0.1


def run(computes: list[list[float]], ratio: float = 1.2) -> list[tuple[int, SpeedChange]]:
    """The changes, each with its step: computes[step][rank], and all ranks wait for the slowest."""
    detector, now = StragglerDetector(ratio), 0.0
    steps = [Steps() for _ in computes[0]]
    waited = [0.0] * len(steps)
    said = []
    for number, row in enumerate(computes, 1):
        now += max(row)
        for rank, own in enumerate(row):
            waited[rank] += max(row) - own
            steps[rank].add(now, waited[rank])
        changes = detector.compare({rank: steps[rank].totals() for rank in range(len(row))})
        said += [(number, change) for change in changes]
    return said


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_rank_that_is_30_percent_slower_is_named_within_20_steps(world_size: int) -> None:
    even = [STEP_SECONDS] * world_size
    slow = [*even[:-1], 1.3 * STEP_SECONDS]
    [(number, change)] = run([even] * 30 + [slow] * 40)
    assert 30 < number <= 50
    assert change.is_slow and change.rank == world_size - 1
    assert change.message("h2") == (
        f"rank {world_size - 1} (host h2) is slower than its peers: compute 0.130 s per step, median 0.100; "
        "the others waited 0.030 s for it"
    )


def test_a_rank_that_recovers_is_named_again_once() -> None:
    even, slow = [0.1, 0.1, 0.1], [0.1, 0.15, 0.1]
    (_, first), (number, second) = run([even] * 10 + [slow] * 40 + [even] * 40)
    assert first.is_slow and not second.is_slow and second.rank == 1
    assert 50 < number <= 70
    assert second.message("") == "rank 1 is no longer slower than its peers"


def test_a_pause_of_one_rank_names_nobody() -> None:
    even = [0.1, 0.1]
    pause = [5.0, 0.1]  # it saves a checkpoint, or evaluates
    assert run(([even] * 24 + [pause]) * 4) == []


def test_steps_that_are_unequal_by_chance_name_nobody() -> None:
    chance = random.Random(3)
    rows = [[0.1 * chance.uniform(0.7, 1.5) for _ in range(4)] for _ in range(2000)]
    assert run(rows) == []


def test_all_ranks_slower_together_name_nobody() -> None:
    assert run([[0.1, 0.1]] * 20 + [[0.3, 0.3]] * 40) == []


def test_a_rank_for_which_nobody_waited_is_not_named() -> None:
    """Its compute ran beside the others' (a longer epilogue that overlaps): no step was longer for it."""
    detector = StragglerDetector(1.2)
    tables = [Steps(), Steps()]
    for step in range(1, 60):
        tables[0].add(0.1 * step, 0.03 * step)
        tables[1].add(0.1 * step, 0.03 * step)
        assert detector.compare({0: tables[0].totals(), 1: tables[1].totals()}) == []


def test_short_steps_that_are_looked_at_seldom_are_compared_over_the_same_ones() -> None:
    detector, tables = StragglerDetector(1.2), [Steps(), Steps()]
    said: list[SpeedChange] = []
    for step in range(1, 20_001):
        tables[0].add(1.5e-3 * step, 0.5e-3 * step)
        tables[1].add(1.5e-3 * step, 0.0)
        if step % 700 == 0:  # once a second, and not at the same moment
            late = {0: tables[0].totals(), 1: tables[1].totals()}
            said += detector.compare(late)
        if step % 700 == 40:
            early = tables[0].totals()
            said += detector.compare({0: early, 1: tables[1].totals()})
    assert [change.rank for change in said] == [1]


def slow_rank() -> list[str]:
    """Rank 1 sleeps 60 ms more in each step from the tenth on."""
    heard = Lines()
    logging.getLogger("xds").setLevel(logging.INFO)
    engine = engine_of(2)
    for step in range(60):
        time.sleep(0.06 + (0.06 if engine.global_rank == 1 and step >= 10 else 0.0))
        one_step(engine, step)
    dist.barrier()
    engine.destroy()
    return [line for line in heard.lines if "slower" in line]


@pytest.mark.slow
def test_a_rank_that_sleeps_in_its_steps_is_named_by_rank_0() -> None:
    first, *others = run_new_ranks(slow_rank, 4)  # from four ranks on
    assert len(first) == 1 and first[0].startswith("xds: rank 1 (host "), first
    assert " is slower than its peers: compute 0.1" in first[0]
    assert others == [[], [], []]
