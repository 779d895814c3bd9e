"""Measure the time from `kill -9` of a worker to the next step, and to the detection of a kill or a cut link.

The training is toy_training.py at ZeRO stage 3 with a checkpoint each step; it is killed by its process
id. Hosts are namespaces (tests/real_hosts.py); without root these rows are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TESTS = FOLDER.parents[1] / "tests"
sys.path[:0] = [str(FOLDER.parent), str(TESTS)]

from harness import Row, Watch, finish, wait_until_quiet  # noqa: E402
from real_hosts import Hosts, why_not  # noqa: E402

XDS = [sys.executable, "-m", "xds.launcher.cli"]
RESTART_SECONDS = 10.0  # and one import of torch
DETECTION_SECONDS = 1.0
HEARTBEAT_SECONDS = 6.0  # the default
PATIENCE_SECONDS = 180.0
WAIT = """\
import os, signal, sys, time
from pathlib import Path
rank, folder = os.environ["RANK"], Path(sys.argv[1])
def told(signum, frame):
    (folder / f".told{rank}").write_text(repr(time.time()))
    (folder / f".told{rank}").rename(folder / f"told{rank}")
    os._exit(0)
signal.signal(signal.SIGTERM, told)
(folder / f".there{rank}").write_text(str(os.getpid()))
(folder / f".there{rank}").rename(folder / f"there{rank}")
while True:
    time.sleep(0.005)
"""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "",
    "XDS_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS),
}


class Place:
    """Where two ranks run: on this machine, or on two hosts."""

    def __init__(self, hosts: Hosts | None) -> None:
        self.hosts = hosts
        self.title = "2 ranks, one host" if hosts is None else "2 ranks, two hosts"

    @contextlib.contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[Any]]:
        """Run xds with these options, script and arguments; it ends with the context."""
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if self.hosts is None:
            begin = [*XDS, "--nproc-per-node", "2", *words]
            environment = {**os.environ, **ENVIRONMENT}
            process = subprocess.Popen(begin, env=environment, stdin=subprocess.DEVNULL, **quiet)
        else:
            begin = [*XDS, "--hostfile", str(self.hosts.hostfile(1)), *words]
            process = self.hosts.popen(begin, ENVIRONMENT, **quiet)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            if self.hosts is not None:
                self.hosts.wait_until_empty(30)

    def workers(self, word: str) -> list[int]:
        """Pids (here) of the ranks whose command line holds `word`, rank 0's first."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().decode().split("\0")
                if word in words and any(w.endswith("/worker.py") for w in words):
                    environ = (path / "environ").read_bytes().split(b"\0")
                    rank = next(e for e in environ if e.startswith(b"RANK="))
                    found.append((int(rank[5:]), int(path.name)))
        return [pid for _, pid in sorted(found)]


def wait_for(what: Callable[[], bool]) -> None:
    """Poll every 2 ms."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come")
        time.sleep(0.002)


def seconds_to_step(place: Place, times: int) -> list[float]:
    """Seconds from each of `times` kills of rank 1 to the next step that rank 0 reports."""
    with tempfile.TemporaryDirectory(prefix="restart-") as name:
        steps = Path(name, "steps")
        script = str(FOLDER / "toy_training.py")
        words = ["--max-restarts", str(times), script, name, "3", "0", "1000000", "1", "0.1"]

        def count() -> int:
            return steps.read_text().count("\n") if steps.exists() else 0

        found = []
        with place.running(*words):
            wait_for(lambda: count() > 3)
            for _ in range(times):
                victim = place.workers(script)[1]
                os.kill(victim, signal.SIGKILL)
                begin = time.monotonic()
                time.sleep(0.5)  # a step may still be running
                done = count()
                wait_for(lambda done=done: count() > done)
                found.append(time.monotonic() - begin)
                time.sleep(1.0)
        return found


def seconds_to_tell(place: Place, times: int, is_cut: bool) -> dict[int, list[float]]:
    """Seconds from the kill of rank 1, or the cut of its link, to its detection by the other ranks, by rank.

    Rank 0 is sent SIGTERM. Rank 1, when its host is cut off, is not reachable, so its actions are not visible.
    """
    found: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(times):
        with tempfile.TemporaryDirectory(prefix="detection-") as name:
            folder = Path(name)
            script = folder / "wait.py"
            script.write_text(WAIT)
            with place.running(str(script), name):
                wait_for(lambda f=folder: len(list(f.glob("there*"))) == 2)
                time.sleep(1.0)
                victim = place.workers(str(script))[1]
                begin = time.time()
                if is_cut:
                    assert place.hosts is not None
                    place.hosts.cut("host1")
                else:
                    os.kill(victim, signal.SIGKILL)
                try:
                    if is_cut:
                        wait_for(lambda pid=victim: not os.path.exists(f"/proc/{pid}"))
                        found[1].append(time.time() - begin)
                    wait_for((folder / "told0").exists)
                    found[0].append(float((folder / "told0").read_text()) - begin)
                finally:
                    if is_cut and place.hosts is not None:
                        place.hosts.mend("host1")
    return found


def import_seconds(ranks: int = 2) -> float:
    """One import of torch, in as many processes side by side as there are ranks."""
    begin = time.monotonic()
    words = [sys.executable, "-c", "import torch"]
    for process in [subprocess.Popen(words) for _ in range(ranks)]:
        process.wait()
    return time.monotonic() - begin


def row(name: str, seconds: list[float], must: float, **rest: Any) -> Row:
    """The median of all, with its spread."""
    middle = statistics.median(seconds)
    return Row(name, middle, min(seconds), max(seconds), must=must, unit=" s", **rest)


def measure(place: Place, times: int) -> list[Row]:
    """All rows of one place."""
    rows = []
    with Watch() as watch:
        imports = [import_seconds() for _ in range(3)]
        restarts = seconds_to_step(place, times)
        imports += [import_seconds() for _ in range(3)]
    one = statistics.median(imports)
    name = f"kill -9 to the first new step, {place.title}"
    found = {"note": f"import of torch {one:.2f} s", "others_busy": watch.others}
    rows.append(row(name, restarts, RESTART_SECONDS + one, **found))
    told = seconds_to_tell(place, times, is_cut=False)
    name = f"kill -9 to the SIGTERM of its peer, {place.title}"
    rows.append(row(name, told[0], DETECTION_SECONDS))
    if place.hosts is not None:
        told = seconds_to_tell(place, times, is_cut=True)
        ends = {0: "the SIGTERM on the other host", 1: "the end of the ranks on the cut-off host"}
        for rank, what in ends.items():
            name = f"cut link to {what}"
            note = f"heartbeat {HEARTBEAT_SECONDS:.0f} s"
            rows.append(row(name, told[rank], HEARTBEAT_SECONDS + 1.0, note=note))
    return rows


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--quiet-minutes", type=float, default=0.0, help="wait for a quiet machine")
    parser.add_argument("--no-save", action="store_true")
    asked = parser.parse_args()
    wait_until_quiet(asked.quiet_minutes)
    rows = measure(Place(None), asked.times)
    if why_not():
        rows.append(Row("two hosts", void=f"SKIP: {why_not()}"))
    else:
        with Hosts(2) as hosts:
            rows += measure(Place(hosts), asked.times)
    return finish(__file__, rows, keeps=not asked.no_save)


if __name__ == "__main__":
    sys.exit(main())
