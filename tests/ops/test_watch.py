"""Tests of the ranks' reports after a failed collective, and of the message made from them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks

from xds.ops.comm.collectives import ACCESS_BUFFER
from xds.ops.comm.native import Native
from xds.ops.comm.opening import open_collectives
from xds.ops.comm.shared_memory import SharedMemory
from xds.ops.watch import Report, Store, Watch, explain
from xds.ops.watch.config import WatchConfig
from xds.ops.watch.diagnosis import GONE, OUTSIDE, first_difference
from xds.ops.watch.sentinel import start_watching, stop_watching
from xds.utils.errors import PeerError

A, B, C = (f"all_gather of unit '{name}'" for name in "abc")
R = "reduce_scatter of unit 'a'"


def report(rank: int, recent: list[str], **fields: Any) -> Report:
    """A rank that waits in the last one of `recent`."""
    counts = {name: recent.count(name) for name in recent}
    waits = {"waits_in": recent[-1], "number": counts[recent[-1]]}
    return Report(rank, **{**waits, "counts": counts, "recent": recent, **fields})


# one's collectives, two's, the first that differs
HISTORIES: list[tuple[list[str], list[str], tuple[int, str, str] | None]] = [
    ([A, B], [A, B], None),
    ([A, B], [A, C], (2, B, C)),
    ([A, R, B], [A, B, R], None),  # what is not a gather does not count
    ([A, B], [A], (2, B, "")),
    ([R], [A], (1, "", A)),
    ([], [], None),
]


@pytest.mark.parametrize(("one", "two", "want"), HISTORIES)
def test_the_first_gather_that_differs(one: list[str], two: list[str], want: Any) -> None:
    first, second = (
        Report(rank, counts={n: names.count(n) for n in names}, recent=names)
        for rank, names in enumerate((one, two))
    )
    assert first_difference(first, second, "all_gather") == want


def test_only_what_both_ranks_remember_is_compared() -> None:
    long = Report(0, counts={A: 90, B: 10}, recent=[A, B, A])  # numbers 98, 99, 100
    short = Report(1, counts={A: 90, C: 9}, recent=[C, A, C])  # numbers 97, 98, 99
    assert first_difference(long, short, "all_gather") == (99, B, C)


KEY = "set zero_optimization.divergent_graphs to true"
UNITS = (
    "(0 * its output is enough), put it into one unit with a module that every rank calls "
    "(zero_optimization.units), or train at stage 2; torch.utils.checkpoint needs use_reentrant=False where "
    "ranks leave parameters unused"
)
SENTENCES: list[tuple[list[Report], int, str]] = [
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
    reports: list[Report], world_size: int, want: str
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


def small_gathers_of_two_sizes() -> str:
    """Ranks meet in small gathers of different sizes: gloo alone would abort the process."""
    group = dist.group.WORLD
    collectives = open_collectives(group, torch.device("cpu"))
    assert isinstance(collectives, SharedMemory)
    collectives.barrier()
    numel = 1 + 7 * collectives.rank
    with pytest.raises(PeerError) as caught:
        if collectives.rank == 2:
            collectives.gather_small(torch.zeros(2), ACCESS_BUFFER, "get_full_param(w)")
        else:
            collectives.gather_small(torch.zeros(numel))
    return str(caught.value)


@pytest.mark.slow
def test_small_gathers_that_do_not_fit_are_named() -> None:
    for text in run_new_ranks(small_gathers_of_two_sizes, 3, timeout_seconds=4):
        assert "ranks 0, 1 wait in exchange of norms and flags" in text
        assert "rank 2 waits in access of get_full_param(w), for the 1st time" in text
        assert "Access to parameters is collective" in text


def barrier_alone(native: bool) -> str:
    """Rank 0 is in a barrier that rank 1 never joins."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    collectives = Native(group, cpu) if native else open_collectives(group, cpu)
    collectives.barrier()
    with pytest.raises(PeerError) as caught:
        if collectives.rank == 0:
            collectives.barrier()
        else:
            flat = torch.zeros(8)
            collectives.all_gather(flat, flat[4:], buffer=0, kind="all_gather").wait()
    return str(caught.value)


@pytest.mark.parametrize("native", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_barrier_that_nobody_joins_is_named(native: bool) -> None:
    for text in run_new_ranks(barrier_alone, 2, native, timeout_seconds=4):
        assert "rank 0 waits in barrier of all ranks, for the 2nd time" in text
        assert "rank 1 waits in all_gather of flat buffer 0" in text
