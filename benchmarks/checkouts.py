"""Step time of two checkouts: medians of ratios of processor time, and counts of calls that have no noise.

    python benchmarks/checkouts.py OLD [NEW] [--pairs 400] [--steps 4] [--only 'tiny*'] [--counts]

Each checkout trains in a process of its own, one rank of one thread on the CPU. The two take turns of a few
steps, in the order old new new old: a ratio is that of neighbours. The row "old twice" has two processes of the
old one: so far may a ratio be from 1 by chance. NEW is this checkout by default. --counts counts in a step the
calls of functions of Python and of C, and instructions of Python's interpreter, and measures no time.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "step_time")]
from harness import ONE_THREAD  # noqa: E402
from model import make_batches, make_model  # noqa: E402

MUST = 1.01
ROWS = tuple(
    f"{model}, stage {stage}, {precision}"
    for model in ("tiny", "11M")
    for stage in (0, 2, 3)
    for precision in ("fp32", "bf16")
)


# -- a process of one checkout -----------------------------------------------------------------------------


def training(row: str) -> Callable[[], None]:
    """One step of a row."""
    import torch

    import xds

    name, stage, precision = row.split(", ")
    model = make_model(name, 16)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": int(stage.removeprefix("stage "))},
        "bf16": {"enabled": precision == "bf16"},
    }
    engine = xds.initialize(model, config)
    [batch] = make_batches(name, 0, 1, 16)
    if precision == "bf16" and batch.is_floating_point():
        batch = batch.to(torch.bfloat16)

    def step() -> None:
        engine.backward(engine(batch))
        engine.step()

    return step


def counts_of(step: Callable[[], None]) -> dict[str, int]:
    """Calls of one step by kind, and instructions of Python."""
    found: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: found.update([event]))
    step()
    sys.setprofile(None)

    def trace(frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found.update([event])
        return trace

    calls = {"calls": found["call"], "calls of C": found["c_call"]}
    sys.settrace(trace)
    step()
    sys.settrace(None)
    return {**calls, "instructions": found["opcode"]}


def serve(number: int, row: str) -> None:
    """Answer each number of steps with its seconds of the processor, 0 with counts."""
    import torch

    torch.set_num_threads(1)
    pipe, step = Connection(number), training(row)
    for _ in range(20):
        step()
    gc.collect()
    gc.freeze()
    gc.disable()  # or it runs in the turn of either
    pipe.send(None)
    while count := pipe.recv():
        gc.collect()
        begin = time.process_time()
        for _ in range(count):
            step()
        pipe.send(time.process_time() - begin)
    pipe.send(counts_of(step))


class Checkout:
    """The process that trains a row with a checkout."""

    def __init__(self, root: Path, row: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "xds").symlink_to(root.resolve(), target_is_directory=True)
        self._pipe, there = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", str(there.fileno()), "--only", row],
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(folder)},
            pass_fds=[there.fileno()],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        there.close()
        self._pipe.recv()

    def seconds(self, steps: int) -> float:
        self._pipe.send(steps)
        return float(self._pipe.recv())

    def end(self) -> dict[str, int]:
        """The counts of a step."""
        self._pipe.send(0)
        counts: dict[str, int] = self._pipe.recv()
        self._process.wait()
        return counts


# -- comparisons -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How many pairs of turns there are, and the steps of a turn."""

    pairs: int
    steps: int


def ratios(old: Checkout, new: Checkout, plan: Plan) -> list[float]:
    """The new time over the old one, of neighbouring turns."""
    found = []
    for pair in range(plan.pairs):
        seconds = {}
        for checkout in (old, new) if pair % 2 == 0 else (new, old):
            seconds[checkout] = checkout.seconds(plan.steps)
        found.append(seconds[new] / seconds[old])
    return found


def timed(row: str, old: Path, new: Path, plan: Plan) -> bool:
    """Print a row. Whether its median is at most `MUST`."""
    is_met = True
    for name, other in (("old twice", old), ("new over old", new)):
        with tempfile.TemporaryDirectory() as folder:
            first, second = (
                Checkout(root, row, Path(folder) / end) for end, root in (("a", old), ("b", other))
            )
            found = ratios(first, second, plan)
            first.end(), second.end()
        low, median, high = statistics.quantiles(found, n=4)
        error = 1.25 * statistics.stdev(found) / len(found) ** 0.5  # of a median
        print(f"{row:28} {name:13} {median:.4f} ± {error:.4f} (quarters {low:.4f} to {high:.4f})")
        is_met = median <= MUST
    return is_met


def counted(row: str, old: Path, new: Path) -> None:
    """Print the counts of a row."""
    with tempfile.TemporaryDirectory() as folder:
        roots = {"old": old, "new": new}
        both = [Checkout(root, row, Path(folder) / name).end() for name, root in roots.items()]
    for name, before in both[0].items():
        after = both[1][name]
        print(f"{row:28} {name:13} {before:8} {after:8}  {after / before:.4f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?", default=HERE.parent)
    parser.add_argument("--pairs", type=int, default=400, help="pairs of turns (default: 400)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn (default: 4)")
    parser.add_argument("--only", default="*", help="rows by a pattern")
    parser.add_argument("--counts", action="store_true", help="count calls, measure no time")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.only)
        return 0
    met = True
    for row in (row for row in ROWS if fnmatchcase(row, given.only)):
        if given.counts:
            counted(row, given.old, given.new)
        else:
            met &= timed(row, given.old, given.new, Plan(given.pairs, given.steps))
    return int(not met)


if __name__ == "__main__":
    raise SystemExit(main())
