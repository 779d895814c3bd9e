"""Shared memory between ranks of one machine: large collectives against a plain copy, small messages, and gloo.

    python benchmarks/comm/main.py [--only PATTERN] [--runs 7] [--quick] [--quiet-minutes 5]

A run is one set of new processes, because the time depends on where the system puts their memory. In it all
ways take turns, and a turn is the slowest rank's. A row is the median over runs of the median of the ratios of
turns of one round, with the smallest and the largest run.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
from harness import Row, Watch, finish, run_ranks, slowest, wait_until_quiet  # noqa: E402

LARGE_BYTES, SMALL_BYTES = 64 << 20, 1 << 10
TURNS, CALLS, SMALL_TURNS = 15, 50, 4  # small ones: turns of 50 calls, 4 times as many
US = 1e6
Ways = dict[str, Callable[[], Any]]
Seconds = dict[str, list[float]]


def both(device: Any) -> tuple[Any, Any]:
    """Collectives of all ranks over shared memory, and over messages of gloo."""
    import torch.distributed as dist

    from xds.ops.comm.config import Communication
    from xds.ops.comm.opening import open_collectives

    shared = open_collectives(dist.group.WORLD, device)
    assert hasattr(shared, "neighbours"), "these ranks share no memory: see `xds env`"
    plain = Communication(shared_memory=False)
    return shared, open_collectives(dist.group.WORLD, device, None, plain)


def large(rank: int, world_size: int, turns: int) -> Seconds:
    """Seconds of every turn on this rank. The flats of shared memory live in it, and a shard in its flat."""
    import torch

    shared, messages = both(torch.device("cpu"))
    numel = LARGE_BYTES // 4
    source, target = torch.ones(numel), torch.ones(numel)
    ways: Ways = {}
    for name, of in (("memory", shared), ("messages", messages)):
        flat, full = (of.empty(numel, torch.float32).fill_(rank + 1.0) for _ in range(2))
        out = of.empty(numel // world_size, torch.float32).zero_()
        both_ops = {"reduce_scatter": reducing(of, flat, out), "all_gather": gathering(of, full)}
        for call in both_ops.values():
            call()
        assert out.eq(world_size * (world_size + 1) / 2).all()
        assert all(of.shard_of(full, peer).eq(peer + 1).all() for peer in range(world_size))
        ways |= {f"{op}, {name}": call for op, call in both_ops.items()}
    ways["copy of one rank"] = lambda: target.copy_(source) if rank == 0 else None
    ways["copy"] = lambda: target.copy_(source)
    first = ("reduce_scatter, memory", "copy", "all_gather, memory")  # neighbours
    return in_turns(shared, {name: ways[name] for name in (*first, *ways)}, turns, 1)


def reducing(of: Any, flat: Any, out: Any) -> Callable[[], Any]:
    return lambda: of.reduce_scatter(flat, out, add=False, buffer=0, kind="reduce_scatter").wait()


def gathering(of: Any, flat: Any) -> Callable[[], Any]:
    own = of.shard_of(flat)
    return lambda: of.all_gather(flat, own, buffer=0, kind="all_gather").wait()


def small(rank: int, world_size: int, turns: int) -> Seconds:
    """The same for 1 KiB. A message: to the other rank and back, half of the time."""
    import torch

    shared, messages = both(torch.device("cpu"))
    ways: Ways = {}
    for name, of in (("memory", shared), ("messages", messages)):
        flat = torch.ones(SMALL_BYTES // 4)
        ways[f"message, {name}"] = ping_pong(of, flat, rank)
        ways[f"reduce_scatter, {name}"] = reducing(of, flat, of.shard_of(flat).clone())
        ways[f"all_gather, {name}"] = gathering(of, flat.clone())
        ways[f"sum, {name}"] = partial(of.sum, flat.clone(), what="a sum", kind="sum")
    found = in_turns(shared, ways, SMALL_TURNS * turns, CALLS)
    return {
        name: [each / (1 + name.startswith("message,")) for each in seconds]
        for name, seconds in found.items()
    }


def ping_pong(of: Any, tensor: Any, rank: int) -> Callable[[], None]:
    peer = 1 - rank

    def send() -> None:
        of.send(tensor, peer, number=0, what="a message", kind="send").wait()

    def receive() -> None:
        of.receive(tensor, peer, number=0, what="a message").wait()

    def call() -> None:
        for step in (send, receive) if rank == 0 else (receive, send):
            step()

    return call


def in_turns(of: Any, ways: Ways, turns: int, calls: int) -> Seconds:
    """Seconds of a call in every turn. The order rotates, so that neighbours change."""
    names = list(ways)
    seconds: Seconds = {name: [] for name in names}
    for turn in range(turns + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            of.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                ways[name]()
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: each[1:] for name, each in seconds.items()}


def runs_of(
    function: Any, ranks: int, args: argparse.Namespace
) -> tuple[list[Seconds], list[float]]:
    """Of every run the turns, of the slowest rank, and the share of the cores that others used."""
    found, busy = [], []
    for _ in range(args.runs):
        wait_until_quiet(args.quiet_minutes)
        with Watch() as watch:
            found.append(slowest(run_ranks(function, ranks, args.turns)))
        busy.append(watch.others or 0.0)
    return found, busy


def ratio(name: str, runs: list[Seconds], ways: tuple[str, str], **rest: Any) -> Row:
    """A row: the first way over the second."""
    ours, theirs = ways
    each = [
        statistics.median(a / b for a, b in zip(run[ours], run[theirs], strict=True))
        for run in runs
    ]
    times = [1e3 * statistics.median(statistics.median(run[way]) for run in runs) for way in ways]
    note = f"{times[0]:.1f} ms over {times[1]:.1f} ms; {len(runs)} runs"
    return of_runs(name, each, note=note, **rest)


def of_runs(name: str, each: list[float], **rest: Any) -> Row:
    return Row(name, statistics.median(each), min(each), max(each), samples={"runs": each}, **rest)


def rows_of_2(args: argparse.Namespace) -> list[Row]:
    """64 MiB on 2 ranks, against a plain copy of as many bytes by each rank, both at once."""
    runs, busy = runs_of(large, 2, args)
    rows = []
    for op, must, aim in (("reduce_scatter", 0.75, 0.6), ("all_gather", 0.65, 0.5)):
        ours, name = f"{op}, memory", f"64 MiB, 2 ranks: {op}"
        rows.append(ratio(f"{name} / copy", runs, (ours, "copy"), must=must, aim=aim))
        rows.append(ratio(f"{name} / copy of one rank alone", runs, (ours, "copy of one rank")))
        rows.append(ratio(f"{name} / messages", runs, (ours, f"{op}, messages")))
    return marked(rows, busy)


def rows_of_4(args: argparse.Namespace) -> list[Row]:
    """64 MiB on 4 ranks, against messages of gloo."""
    runs, busy = runs_of(large, 4, args)
    rows = []
    for op in ("reduce_scatter", "all_gather"):
        ours, name = f"{op}, memory", f"64 MiB, 4 ranks: {op}"
        rows.append(ratio(f"{name} / messages", runs, (ours, f"{op}, messages"), must=0.5))
        rows.append(ratio(f"{name} / copy", runs, (ours, "copy")))
    return marked(rows, busy)


def rows_of_small(args: argparse.Namespace) -> list[Row]:
    """1 KiB on 2 ranks, in microseconds."""
    runs, busy = runs_of(small, 2, args)
    rows = []
    for op in ("message", "reduce_scatter", "all_gather", "sum"):
        each, theirs = (
            [US * statistics.median(run[f"{op}, {way}"]) for run in runs]
            for way in ("memory", "messages")
        )
        note = f"messages {statistics.median(theirs):.0f} us; {len(runs)} runs"
        bars = {"must": 20.0, "aim": 5.0, "unit": " us"}
        rows.append(of_runs(f"1 KiB, 2 ranks: {op}", each, note=note, **bars))
    return marked(rows, busy)


def marked(rows: list[Row], busy: list[float]) -> list[Row]:
    """busy: of each run the share of the cores that others used."""
    for row in rows:
        row.others_busy = statistics.median(busy)
        row.samples["others_busy"] = busy
    return rows


PARTS = {"large-2": rows_of_2, "large-4": rows_of_4, "small": rows_of_small}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="*", help=f"{', '.join(PARTS)}, as a shell pattern")
    parser.add_argument("--runs", type=int, default=7, help="sets of new processes")
    parser.add_argument("--quick", action="store_true", help="one run; keeps nothing")
    parser.add_argument("--quiet-minutes", type=float, default=0.0, help="wait for others")
    args = parser.parse_args()
    args.turns = 3 if args.quick else TURNS
    args.runs = 1 if args.quick else args.runs
    parts = [part for name, part in PARTS.items() if fnmatch.fnmatch(name, args.only)]
    # each part is kept when it is there: a run on a busy machine may be stopped
    return max((finish(HERE, part(args), keeps=not args.quick) for part in parts), default=0)


if __name__ == "__main__":
    sys.exit(main())
