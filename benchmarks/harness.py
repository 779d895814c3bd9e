"""Shared functions of the benchmarks: start ranks, alternate contestants, compute medians, print rows.

Rules of measurement: contestants of one comparison run in the same processes and alternate;
a row is the median of the ratios of neighbouring turns, with their smallest and largest; seconds
on a shared machine are notes. One thread per rank.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "DS_ACCELERATOR": "cpu",
    "DS_BUILD_OPS": "0",
}


BUSY = 0.10  # share of all cores used by other processes above which a row notes it


class Skip(Exception):
    """A contestant that cannot run here; the message is the reason that the table shows."""


class RankFailed(Exception):
    """A rank raised or died; contains its traceback."""


# ---- ranks ---------------------------------------------------------------------------------


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 900
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in new processes that form one gloo group.

    Returns what each rank returned, in rank order. The first failure ends all the others.
    """
    os.environ.update(ONE_THREAD)  # a thread pool reads it when its library is loaded
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            call = (fn, rank, world_size, f"{folder}/rendezvous", theirs, args)
            process = context.Process(target=_rank_main, args=call, daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return _collect(ranks, time.monotonic() + timeout_seconds)
        finally:
            for process, _ in ranks:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(ranks: list[tuple[Any, Connection]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {conn: rank for rank, (_, conn) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        for conn in ready:
            rank = waiting.pop(conn)  # type: ignore[call-overload]
            try:
                ok, payload = conn.recv()  # type: ignore[union-attr]
            except EOFError:
                ok, payload = False, "died without a word"
            if not ok:
                _terminate(ranks)
                raise RankFailed(f"rank {rank}: {payload}")
            results[rank] = payload
        if not ready:
            _terminate(ranks)
            raise RankFailed(f"ranks {sorted(waiting.values())} did not finish in time")
    return [results[rank] for rank in range(len(ranks))]


def _terminate(ranks: list[tuple[Any, Connection]]) -> None:
    for process, _ in ranks:
        process.terminate()


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    rendezvous: str,
    conn: Connection,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # otherwise other libraries would print the same warning at every call
    warnings.simplefilter("ignore")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=180),
        )
        result = fn(rank, world_size, *args)
        dist.barrier()
        conn.send((True, result))
    except BaseException:
        conn.send((False, traceback.format_exc()))
    finally:
        conn.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # threads and exit hooks of other libraries may abort a finished rank


# ---- taking turns --------------------------------------------------------------------------


@dataclass
class Plan:
    """How often each contestant takes its turn, and how many steps a turn has."""

    rounds: int = 9
    block: int = 2
    warmup: int = 3


def alternate(
    steps: dict[str, Callable[[int], Any]], plan: Plan
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Let the contestants take turns: seconds a step for each turn, and the loss of every step.

    `steps[name](i)` runs step i and returns a scalar loss. The order rotates from round to round
    so that the neighbours change. Runs the same on every rank.
    """
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[Any]] = {name: [] for name in steps}
    for name, step in steps.items():
        losses[name] += [step(i).detach() for i in range(plan.warmup)]
    gc.collect()
    gc.freeze()
    names = list(steps)
    for turn in range(plan.rounds):
        shift = turn % len(names)
        order = names[shift:] + names[:shift]
        for name in order if turn % 2 == 0 else reversed(order):
            start_step = len(losses[name])
            dist.barrier()
            start = time.perf_counter()
            new = [steps[name](start_step + i).detach() for i in range(plan.block)]
            dist.barrier()  # inside the measured time, so that no work continues in the next turn
            seconds[name].append((time.perf_counter() - start) / plan.block)
            losses[name] += new
    return seconds, {name: [float(loss) for loss in kept] for name, kept in losses.items()}


def slowest(per_rank: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Each sample is the slowest rank's."""
    return {
        name: [max(sample) for sample in zip(*(rank[name] for rank in per_rank), strict=True)]
        for name in per_rank[0]
    }


def mean_over_ranks(per_rank: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Each sample is the mean over ranks."""
    return {
        name: [statistics.fmean(s) for s in zip(*(rank[name] for rank in per_rank), strict=True)]
        for name in per_rank[0]
    }


# ---- memory ----------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    """Memory of this process that no file backs. Of a page that n processes map, each has 1/n.

    Ranks of one machine read the shards of one another in place: counted whole, one page would be n pages.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kinds = ("Anonymous:", "Pss_Shmem:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))


def peak_of(work: Callable[[], Any]) -> tuple[Any, int]:
    """The result of `work`, and the peak memory of this process during it."""
    peak, is_over = anonymous_bytes(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    result = work()
    is_over.set()
    watcher.join()
    return result, peak


# ---- rows ----------------------------------------------------------------------------------


@dataclass
class Row:
    """One line of a table: a figure, its spread and the target."""

    name: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    must: float | None = None
    unit: str = "x"
    void: str = ""  # why the figure does not count; empty when it does
    note: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)
    taken: str = field(default_factory=lambda: datetime.datetime.now().isoformat("T", "seconds"))
    others_busy: float | None = None  # share of all cores that other processes used during the run
    more_is_better: bool = False  # `must` is a lower bound

    @property
    def verdict(self) -> str:
        """met, target missed, VOID or SKIP; `note` where there is no target."""
        if self.void:
            return self.void
        if self.value is None or self.must is None:
            return "note"
        above = self.value >= self.must
        is_met = above if self.more_is_better else self.value <= self.must
        return "met" if is_met else "target missed"

    def cells(self) -> list[str]:
        """The row as the table shows it."""

        def show(number: float | None) -> str:
            return "-" if number is None else f"{number:.3f}{self.unit}"

        spread = "" if self.low is None else f" ({self.low:.3f}-{self.high:.3f})"
        busy = self.others_busy is not None and self.others_busy > BUSY
        note = self.note + (f"; BUSY: others took {self.others_busy:.0%}" if busy else "")
        return [self.name, show(self.value) + spread, show(self.must), self.verdict, note]


HEADERS = ["name", "measured: median (min-max)", "target", "result", "note"]


def ratio_row(name: str, ours: list[float], theirs: list[float], **rest: Any) -> Row:
    """A row for `ours / theirs`, sample by sample: both ran in neighbouring turns."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Row(name, statistics.median(ratios), min(ratios), max(ratios), **rest)


def print_rows(rows: Sequence[Row]) -> None:
    """One aligned line per row."""
    table = [HEADERS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEADERS))]
    for line in table:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip(), flush=True)


# ---- the machine and the results -----------------------------------------------------------


class Watch:
    """Share of all cores that other processes used during `with Watch() as watch:`.

    Load of other processes does not cancel in a ratio: it slows the contestant that communicates more.
    Ranks started inside do not count as other processes; they must also end inside.
    """

    others: float | None = None

    def __enter__(self) -> Watch:
        self._start = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        if self._start is None:
            return
        end = self._read()
        if end is not None:
            everything, busy, ours = (b - a for a, b in zip(self._start, end, strict=True))
            self.others = round(max(0.0, busy - ours) / max(1e-9, everything), 3)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds since boot: of all cores, of them busy, of them ours."""
        try:
            words = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
        except OSError:
            return None
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
        ours = os.times()
        used = ours.user + ours.system + ours.children_user + ours.children_system
        return sum(ticks), sum(ticks) - ticks[3] - ticks[4], used


def wait_until_quiet(minutes: float, limit: float = BUSY) -> None:
    """Wait until other processes use little CPU for three seconds; at most `minutes`."""
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        with Watch() as watch:
            time.sleep(3)
        if watch.others is None or watch.others <= limit:
            return


def comparison_parser(about: str, *, example: str, quick: str) -> argparse.ArgumentParser:
    """The options of a script that compares xds with peers: --only, --rounds, --quick, --patience.

    example: a pattern of names for --only. quick: what --quick runs.
    """
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--only", default="*", help=f"rows whose name matches, such as '{example}'")
    parser.add_argument("--rounds", type=int, help="turns of each contestant")
    parser.add_argument("--quick", action="store_true", help=f"{quick}; keeps nothing")
    help_text = "before each comparison, wait so long for others to leave the machine alone"
    parser.add_argument("--patience", type=float, default=0, metavar="MINUTES", help=help_text)
    return parser


def machine() -> dict[str, Any]:
    """The environment of the figures: processor, cores, versions."""
    cpu = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text()
        cpu = re.search(r"model name\s*:\s*(.+)", text).group(1).strip()  # type: ignore[union-attr]
    except (OSError, AttributeError):
        pass
    versions = {"python": platform.python_version()}
    for package in ("torch", "deepspeed", "numpy", "xds-engine"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
    }


def finish(script: str, rows: Sequence[Row], *, keeps: bool, **more: Any) -> int:
    """Print the rows and the machine. Returns the exit code: 1 where a target is missed or a row is void.

    keeps: also write every sample to results/ here, which is not in git. more: what else that file says.
    """
    print_rows(rows)
    here = machine()
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    today = datetime.date.today().isoformat()
    print(f"{today}, {here['cores']} cores of {here['cpu']}, {here['system']}; {versions}")
    if keeps and rows:
        folder = Path(__file__).resolve().parent
        name = "-".join(Path(script).resolve().relative_to(folder).with_suffix("").parts)
        path = folder / "results" / f"{today}-{name}.json"
        path.parent.mkdir(exist_ok=True)
        found = [asdict(row) | {"verdict": row.verdict} for row in rows]
        path.write_text(json.dumps({"machine": here, **more, "rows": found}, indent=1) + "\n")
        print(f"samples: {path}")
    return int(any(row.verdict.startswith(("target missed", "FAIL", "VOID")) for row in rows))
