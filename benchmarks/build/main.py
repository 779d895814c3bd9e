"""Time the build of native ops: cold, cached, with 8 concurrent processes, and after a kill during a build.

    python benchmarks/build/main.py [--quick]

Every figure is for new processes and a new cache folder, with the sources of xds itself. A cold build is the
first call of `load`. A cached load is the call in every later process: it computes the key, checks the library
and registers its kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from harness import Row, Watch, finish, wait_until_quiet  # noqa: E402

COLD_SECONDS, AIM_SECONDS, CACHED_SECONDS, NUM_RACING = 15.0, 6.0, 0.15, 8
LOAD = """
import json, logging, resource, sys, time
import torch
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
start = time.perf_counter()
from xds.ops import libraries
is_loaded = libraries.load("cpu", require=True)
seconds = time.perf_counter() - start
compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"seconds": seconds, "is_loaded": is_loaded, "cpu": compilers.ru_utime + compilers.ru_stime}))
"""
BUILDS = "building the native library"  # a builder logs this line once for each build


def start(cache: Path) -> subprocess.Popen[str]:
    """Start a new process that loads the library of all CPU ops."""
    return subprocess.Popen(
        [sys.executable, "-c", LOAD],
        env={**os.environ, "XDS_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[float, int, float]:
    """The seconds of the load, the number of builds of that process, and the CPU seconds of its compilers."""
    out, log = process.communicate()
    if process.returncode:
        raise SystemExit(f"loading failed:\n{log}")
    answer = json.loads(out.splitlines()[-1])
    assert answer["is_loaded"]
    return float(answer["seconds"]), log.count(BUILDS), float(answer["cpu"])


def cold_and_cached(folder: Path, num_cold: int, num_cached: int) -> list[Row]:
    with Watch() as watch:
        cold = [end(start(folder / f"cold_{turn}")) for turn in range(num_cold)]
    with Watch() as cached_watch:
        cached = [end(start(folder / "cold_0")) for _ in range(num_cached)]
    assert not any(builds for _, builds, _ in cached)
    cpu_seconds = statistics.median(cpu for _, _, cpu in cold)
    rows = [
        row("cold build of all CPU ops", cold, COLD_SECONDS, watch),
        row("cached load, fresh process", cached, CACHED_SECONDS, cached_watch),
    ]
    rows[0].aim = AIM_SECONDS
    rows[0].note += f"; the compilers' CPU time {cpu_seconds:.1f} s"
    return rows


def row(name: str, ended: list[tuple[float, int, float]], must: float, watch: Watch) -> Row:
    seconds = [taken for taken, _, _ in ended]
    return Row(
        name,
        statistics.median(seconds),
        min(seconds),
        max(seconds),
        must=must,
        unit=" s",
        note=f"{len(seconds)} processes",
        samples={name: seconds},
        others_busy=watch.others,
    )


def race(folder: Path) -> Row:
    """Start processes at once, and count how many of them build."""
    racing = [start(folder / "race") for _ in range(NUM_RACING)]
    ended = [end(process) for process in racing]
    slowest = max(seconds for seconds, _, _ in ended)
    return Row(
        f"builds of {NUM_RACING} racing processes",
        float(sum(builds for _, builds, _ in ended)),
        must=1.0,
        unit="",
        note=f"all loaded; the slowest waited {slowest:.1f} s",
    )


def kill(folder: Path, when: str, num_objects: int) -> Row:
    """Kill the build once `num_objects` are compiled: the seconds of the next load, and the remaining files."""
    cache = folder / f"kill_{num_objects}"
    killed = start(cache)
    while killed.poll() is None and not is_at(cache, num_objects):
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    num_left_by_kill = len(list(cache.glob(".tmp-*")))
    seconds, _, _ = end(start(cache))
    num_left = len(list(cache.glob(".tmp-*")))
    return Row(
        f"load after a kill -9 {when}",
        seconds,
        must=COLD_SECONDS,
        unit=" s",
        void="" if num_left_by_kill and not num_left else f"FAIL: {num_left} files left",
        note="no lock, no folder left",
    )


def is_at(cache: Path, num_objects: int) -> bool:
    """Whether a running build has compiled that many objects."""
    began = any(cache.glob(".tmp-*/build.ninja"))
    return began and len(list(cache.glob(".tmp-*/*.o"))) >= num_objects


def main() -> int:
    """Run all; 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one cold build; keeps nothing")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="MINUTES", help="at most, for a quiet machine"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-build-") as name:
        folder = Path(name)
        end(start(folder / "warm"))  # warms up the file cache for all rows
        if options.wait:
            wait_until_quiet(options.wait)
        rows = cold_and_cached(folder, 1 if options.quick else 3, 5)
        rows.append(race(folder))
        rows.append(kill(folder, "at the start of the compilers", 0))
        rows.append(kill(folder, "after the first object", 1))
    return finish(HERE, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
