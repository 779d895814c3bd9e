"""The cost of the watcher: a step with the ring, source lines and wait times, against a step without them.

    python benchmarks/watcher/main.py [--quick] [--keep]

Both engines run in the same processes and alternate. The thread's own CPU time is a separate row: it runs
during the turns of both.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "step_time"), str(HERE.parent)]
from harness import (  # noqa: E402
    Plan,
    Row,
    Watch,
    alternate,
    finish,
    ratio_row,
    run_ranks,
    slowest,
    wait_until_quiet,
)

MUST = 1.01


class Unwatched:
    """Replaces the watch, and does nothing."""

    ring: tuple[Any, ...] = ()

    def start(self, *_: Any, **__: Any) -> None:
        return None

    def begin_wait(self, _: Any) -> float:
        return 0.0

    def end_wait(self, _: Any, __: float) -> None:
        return

    def step(self) -> None:
        return

    def publishing_errors(self, _: str) -> Any:
        import contextlib

        return contextlib.nullcontext()


def time_both(rank: int, _: int, stage: int, plan: Plan) -> dict[str, Any]:
    """One rank's part: both engines alternate; also the thread's CPU time during the turns."""
    from contestants import build
    from model import make_batches, make_model

    batches = make_batches("11M", rank, plan.warmup + plan.rounds * plan.block)
    steps, spent = {}, {"watched": [], "unwatched": []}
    for name in spent:
        step = build(f"xds-{stage}", make_model("11M"), batches[0], False)
        steps[name] = timed(step, batches, spent[name])
    engines = engines_made()
    collectives = engines[1]._sharded.collectives
    collectives.stop_watching()
    collectives._watch = Unwatched()
    thread = next(t for t in threading.enumerate() if t.name == "xds-watch")
    clock = time.pthread_getcpuclockid(thread.ident)
    cpu, wall = time.clock_gettime(clock), time.monotonic()
    seconds, _ = alternate(steps, plan)
    cpu, wall = time.clock_gettime(clock) - cpu, time.monotonic() - wall
    marks = engines[0]._sharded.collectives._watch._serial
    return {
        "seconds": seconds,
        "spent": {name: values[plan.warmup :] for name, values in spent.items()},
        "share": cpu / wall,
        "marks": marks / (plan.warmup + plan.rounds * plan.block),
    }


def timed(step: Any, batches: list[Any], spent: list[float]) -> Any:
    """The step of batch i; the main thread's CPU time of each is added to `spent`."""

    def run(i: int) -> Any:
        begin = time.thread_time()
        loss = step(batches[i])
        spent.append(time.thread_time() - begin)
        return loss

    return run


def engines_made() -> list[Any]:
    """The engines of this process, oldest first: the contestants do not return theirs."""
    import gc

    from xds.engine.engine import Engine

    found = [held for held in gc.get_objects() if type(held) is Engine]
    return sorted(found, key=lambda engine: engine._sharded.collectives.instance)


def microseconds_a_collective(calls: int = 20_000) -> float:
    """Start, begin and end of one collective, from eight frames below the script."""
    import torch

    from xds.ops.watch.watch import Watch as Watcher

    watch, shard = Watcher(0, 2, 0, lambda: None), torch.zeros(8)

    def deep(depth: int) -> None:
        if depth:
            return deep(depth - 1)
        mark = watch.start("all_gather", 0, tensor=shard)
        watch.end_wait(mark, watch.begin_wait(mark))
        return None

    def bare(depth: int) -> None:
        return bare(depth - 1) if depth else None

    spent = []
    for function in (deep, bare):
        begin = time.perf_counter()
        for _ in range(calls):
            function(8)
        spent.append(time.perf_counter() - begin)
    return 1e6 * (spent[0] - spent[1]) / calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few turns, to see that it runs")
    parser.add_argument("--keep", action="store_true", help="write results/ and the table")
    parser.add_argument("--quiet-minutes", type=float, default=0.0)
    args = parser.parse_args()
    plan = Plan(rounds=3, block=2) if args.quick else Plan(rounds=41, block=2)
    rows = [Row("a collective", microseconds_a_collective(), unit=" us", must=10.0)]
    for stage in (2, 3):
        wait_until_quiet(args.quiet_minutes)
        with Watch() as watch:
            ranks = run_ranks(time_both, 2, stage, plan)
        seconds = slowest([rank["seconds"] for rank in ranks])
        watched, unwatched = seconds["watched"], seconds["unwatched"]
        note = f"{ranks[0]['marks']:.0f} collectives a step, {1e3 * min(unwatched):.0f} ms"
        row = ratio_row(
            f"11M stage {stage}: watched / not", watched, unwatched, must=MUST, note=note
        )
        row.others_busy = watch.others
        rows.append(row)
        spent = slowest([rank["spent"] for rank in ranks])
        name = f"11M stage {stage}: CPU time of the main thread"
        rows.append(ratio_row(name, spent["watched"], spent["unwatched"], must=MUST))
        share = 100 * max(rank["share"] for rank in ranks)
        rows.append(Row(f"11M stage {stage}: the thread", share, unit=" % of a core", must=1.0))
    return finish(HERE, rows, keeps=args.keep)


if __name__ == "__main__":
    sys.exit(main())
