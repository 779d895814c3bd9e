"""Time the start and end of 8 ranks that run one barrier: `xds` against `torchrun`, alternating."""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from harness import ONE_THREAD, Row, Watch, finish, ratio_row, wait_until_quiet  # noqa: E402

SCRIPT = """\
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
MUST = 1.1
MODULES = {"xds": "xds.launcher.cli", "torchrun": "torch.distributed.run"}


def seconds_of(module: str, num_ranks: int, script: Path) -> tuple[float, float]:
    """One whole run as a shell command: wall seconds and CPU seconds."""
    words = [sys.executable, "-m", module, "--nproc-per-node", str(num_ranks), str(script)]
    environment = {**os.environ, **ONE_THREAD, "PYTHONSAFEPATH": "1"}
    begin, used = time.perf_counter(), cpu_seconds()
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module}: exit code {done.returncode}\n{done.stderr}")
    return time.perf_counter() - begin, cpu_seconds() - used


def cpu_seconds() -> float:
    """CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(num_ranks: int, rounds: int) -> list[Row]:
    """The ratios of neighbouring turns; the first command alternates."""
    cpu: dict[str, list[float]] = {name: [] for name in MODULES}
    seconds: dict[str, list[float]] = {name: [] for name in MODULES}
    with tempfile.TemporaryDirectory() as folder, Watch() as watch:
        script = Path(folder, "meet.py")
        script.write_text(SCRIPT)
        for module in MODULES.values():  # the file cache, once
            seconds_of(module, 1, script)
        for turn in range(rounds):
            names = list(MODULES) if turn % 2 == 0 else list(reversed(MODULES))
            for name in names:
                clock, used = seconds_of(MODULES[name], num_ranks, script)
                seconds[name].append(clock)
                cpu[name].append(used)
    rest = {"must": MUST, "others_busy": watch.others}
    title = f"{num_ranks} ranks / torchrun"
    rows = []
    for what, taken in ((f"start of {title}", seconds), (f"CPU of a start of {title}", cpu)):
        ours, theirs = taken["xds"], taken["torchrun"]
        note = f"{statistics.median(ours):.2f} s"
        rows.append(ratio_row(what, ours, theirs, note=note, samples=taken, **rest))
    return rows


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quiet-minutes", type=float, default=0.0, help="wait for a quiet machine")
    parser.add_argument("--no-save", action="store_true")
    asked = parser.parse_args()
    wait_until_quiet(asked.quiet_minutes)
    return finish(__file__, measure(asked.ranks, asked.rounds), keeps=not asked.no_save)


if __name__ == "__main__":
    sys.exit(main())
