"""The watch on waits, without ranks that wait: the message made of reports, stuck devices, slow ranks.

test_watch_ranks.py has ranks that stop, sleep or leave something out.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xds.ops.watch import reports as reports_of_ranks
from xds.ops.watch.config import WatchConfig
from xds.ops.watch.diagnosis import GONE, OUTSIDE, RankReport, explain, first_difference
from xds.ops.watch.store import Store
from xds.ops.watch.stragglers import SpeedChange, StragglerDetector
from xds.ops.watch.watch import Probe, Steps, Watch
from xds.ops.watch.watcher import start_watching, stop_watching

A, B, C = (f"all_gather of unit '{name}'" for name in "abc")
R = "reduce_scatter of unit 'a'"


def report(rank: int, recent: list[str], **fields: Any) -> RankReport:
    """A rank that waits in the last one of `recent`."""
    counts = {name: recent.count(name) for name in recent}
    waits = {"waits_in": recent[-1], "number": counts[recent[-1]]}
    return RankReport(rank, **{**waits, "counts": counts, "recent": recent, **fields})


# one's collectives, two's, the first that differs
HISTORIES: list[tuple[list[str], list[str], tuple[int, str, str] | None]] = [
    ([A, B], [A, B], None),
    ([A, B], [A, C], (2, B, C)),
    ([A, R, B], [A, B, R], None),  # what is not a gather does not count
    ([A, B], [A], (2, B, "")),
    ([R], [A], (1, "", A)),
    ([], [], None),
]


def test_the_first_gather_that_differs_of_those_that_both_ranks_remember() -> None:
    for one, two, want in HISTORIES:
        first, second = (
            RankReport(rank, counts={n: names.count(n) for n in names}, recent=names)
            for rank, names in enumerate((one, two))
        )
        assert first_difference(first, second, "all_gather") == want
    long = RankReport(0, counts={A: 90, B: 10}, recent=[A, B, A])  # numbers 98, 99, 100
    short = RankReport(1, counts={A: 90, C: 9}, recent=[C, A, C])  # numbers 97, 98, 99
    assert first_difference(long, short, "all_gather") == (99, B, C)


KEY = "set zero_optimization.divergent_graphs to true"
UNITS = (
    "(0 * its output is enough), put it into one unit with a module that every rank calls "
    "(zero_optimization.units), or train at stage 2; torch.utils.checkpoint needs use_reentrant=False where "
    "ranks leave parameters unused"
)
SENTENCES: list[tuple[list[RankReport], int, str]] = [
    (
        [report(0, [A, B]), report(1, [A, C])],
        2,
        f"rank 0 waits in {B}, for the 1st time, which rank 1 never started; rank 1 waits in {C}, for the "
        "1st time, which rank 0 never started; the 2nd all_gather is the first that differs: unit 'b' on rank "
        "0, unit 'c' on rank 1. At stage 3 every rank must use unit 'b' and unit 'c' equally often, in forward "
        f"and in the loss: {KEY}, or call it on every rank {UNITS}",
    ),
    (
        [report(0, [A, A, A]), report(1, [A, R]), report(2, [A, R])],
        3,
        f"rank 0 waits in {A}, for the 3rd time, which ranks 1, 2 started only once; ranks 1, 2 wait in {R}, "
        "for the 1st time, which rank 0 never started; the 2nd all_gather is the first that differs: unit 'a' "
        "on rank 0, not started on rank 1. At stage 3 every rank must use unit 'a' equally often, in forward "
        f"and in the loss: {KEY}, or call it on every rank {UNITS}",
    ),
    (
        [report(0, [R]), report(1, [A], waits_in="", raised="KeyError: 'x' in forward")],
        2,
        f"rank 0 waits in {R}, for the 1st time, which rank 1 never started; rank 1 raised KeyError: 'x' in "
        "forward. Look at the traceback of rank 1",
    ),
    (
        [report(0, [R], gone=2), report(3, [R])],
        4,
        f"ranks 0, 3 wait in {R}, for the 1st time; rank 2 did not report: {GONE}; rank 1 did not report: "
        f"{OUTSIDE}. Look at the log of ranks 1, 2: every rank must run the same number of steps, and reach "
        "each one within the timeout (XDS_TIMEOUT_SECONDS)",
    ),
    (
        [report(0, [A, A]), report(1, [A], waits_in="", left=True)],
        2,
        f"rank 0 waits in {A}, for the 2nd time, which rank 1 started only once; rank 1 has ended, or "
        "destroyed this engine. Look for fewer batches, or a branch that leaves a call out, on rank 1: every "
        "rank must make the same calls of the engine, equally often",
    ),
    (
        [report(0, [R]), report(1, [R])],
        2,
        f"ranks 0, 1 wait in {R}, for the 1st time. All ranks started the same collectives: one started later "
        "than another's timeout, or the network failed; raise XDS_TIMEOUT_SECONDS if a step may take so long",
    ),
    (
        [report(0, ["access of w"]), report(1, ["exchange of norms"])],
        2,
        "rank 0 waits in access of w, for the 1st time, which rank 1 never started; rank 1 waits in exchange "
        "of norms, for the 1st time, which rank 0 never started. Access to parameters is collective: make the "
        "same call on every rank",
    ),
    (
        [report(0, [R]), report(1, [A], engine=1)],
        2,
        f"rank 0 waits in {R} of engine 0, for the 1st time; rank 1 waits in {A} of engine 1, for the 1st "
        "time. Every rank must make the same calls of forward, backward and step, equally often",
    ),
]


@pytest.mark.parametrize(("reports", "world_size", "want"), SENTENCES)
def test_one_sentence_says_who_went_which_way(
    reports: list[RankReport], world_size: int, want: str
) -> None:
    assert explain(reports, world_size) == want


def test_what_a_rank_raised_is_forgotten_when_it_goes_on() -> None:
    store = Store(dist.HashStore(), "0", 1)
    watch = Watch(1, 2, 0, lambda: store)
    with pytest.raises(ValueError, match="bad"), watch.publishing_errors("forward"):
        raise ValueError("bad\nbatch")
    assert "ValueError: bad in forward" in str(store.read("xds/waits/1"))
    watch.start("all_gather", 0)
    assert store.read("xds/waits/1") is None


def test_a_lost_store_leaves_what_this_rank_knows() -> None:
    class Lost:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    for store in (Store(Lost(), "0", 0), None):
        watch = Watch(0, 2, 0, lambda store=store: store)  # type: ignore[misc]
        watch.name(4, "unit 'a'")
        mark = watch.start("all_gather", 4)
        error = watch.failed(mark, RuntimeError("[pair.cc:1] Connection closed by peer"), 1)
        assert "rank 0 waits in all_gather of unit 'a', for the 1st time" in str(error)
        assert f"rank 1 did not report: {GONE}" in str(error)
        later = watch.failed(watch.start("barrier", 0), RuntimeError("closed"), None)
        assert str(later) == str(error)  # a lost group stays lost, for the first reason


def test_a_store_whose_process_has_stopped_keeps_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection to it waits without a limit, also in a thread of a rank that has no watcher yet."""
    is_over = threading.Event()

    class Stopped:
        def clone(self) -> None:
            is_over.wait()
            raise RuntimeError("Broken pipe")

    monkeypatch.setattr(reports_of_ranks, "REPORTED_SECONDS", 0.05)
    watch = Watch(0, 2, 0, lambda: Store(Stopped(), "0", 0))
    error = watch.failed(watch.start("all_gather", 0), RuntimeError("Connection closed"), 1)
    is_over.set()
    assert f"rank 1 did not report: {GONE}" in str(error)


def test_the_thread_beats_as_often_as_the_engine_that_needs_it_most() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    store = Store(dist.HashStore(), "0", 0)
    watches = [Watch(0, 1, engine, lambda: store) for engine in (0, 1)]
    try:
        for watch, seconds in zip(watches, (60, 0.05), strict=True):
            start_watching(watch, "0", WatchConfig(heartbeat_seconds=seconds), 600)
        beats: set[str | None] = set()
        deadline = time.monotonic() + 30
        while len(beats) < 4 and time.monotonic() < deadline:
            beats.add(store.read("xds/beat/1/0"))
            time.sleep(0.01)
        assert len(beats) == 4
    finally:
        for watch in watches:
            stop_watching(watch)
        dist.destroy_process_group()


def test_buffers_of_one_unit_are_told_apart() -> None:
    watch = Watch(0, 2, 0, lambda: None)
    watch.name(0, "unit 'a'")
    watch.name(1, "unit 'a'")
    for buffer in (0, 1):
        assert watch.start("all_gather", buffer).number == 1
    error = watch.failed(watch.start("all_gather", 1), RuntimeError("x"), None)
    assert "unit 'a' (buffer 1), for the 2nd time" in str(error)


# -- stuck devices ------------------------------------------------------------------------------------------


class Event:
    """Completes when the test sets it."""

    def __init__(self) -> None:
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed


def test_an_event_that_is_not_passed_says_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []

    def record(self: Probe) -> Event:
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(Probe, "_record", record)
    probe = Probe(torch.device("cuda", 0))
    assert not probe.is_stuck()  # the first look records
    assert probe.is_stuck() and probe.is_stuck() and probe.count == 1
    events[0].is_passed = True
    assert not probe.is_stuck() and probe.count == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_busy_device_is_stuck_until_it_is_through() -> None:
    probe = Probe(torch.device("cuda", 0))
    torch.cuda._sleep(2_000_000_000)
    assert not probe.is_stuck()
    assert probe.is_stuck()
    torch.cuda.synchronize()
    assert not probe.is_stuck()


# -- slow ranks ---------------------------------------------------------------------------------------------

STEP_SECONDS = 0.1


def changes_of(computes: list[list[float]], ratio: float = 1.2) -> list[tuple[int, SpeedChange]]:
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
    [(number, change)] = changes_of([even] * 30 + [slow] * 40)
    assert 30 < number <= 50
    assert change.is_slow and change.rank == world_size - 1
    assert change.message("h2") == (
        f"rank {world_size - 1} (host h2) is slower than its peers: compute 0.130 s per step, median 0.100; "
        "the others waited 0.030 s for it"
    )


def test_a_rank_that_recovers_is_named_again_once() -> None:
    even, slow = [0.1, 0.1, 0.1], [0.1, 0.15, 0.1]
    (_, first), (number, second) = changes_of([even] * 10 + [slow] * 40 + [even] * 40)
    assert first.is_slow and not second.is_slow and second.rank == 1
    assert 50 < number <= 70
    assert second.message("") == "rank 1 is no longer slower than its peers"


def test_a_pause_of_one_rank_names_nobody() -> None:
    even = [0.1, 0.1]
    pause = [5.0, 0.1]  # it saves a checkpoint, or evaluates
    assert changes_of(([even] * 24 + [pause]) * 4) == []


def test_steps_that_are_unequal_by_chance_name_nobody() -> None:
    chance = random.Random(3)
    rows = [[0.1 * chance.uniform(0.7, 1.5) for _ in range(4)] for _ in range(2000)]
    assert changes_of(rows) == []


def test_all_ranks_slower_together_name_nobody() -> None:
    assert changes_of([[0.1, 0.1]] * 20 + [[0.3, 0.3]] * 40) == []


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
