"""Start and end of 8 ranks that meet at a barrier: `xds` against `torchrun`, by turns."""

from __future__ import annotations

import argparse
import os
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


def seconds_of(module: str, num_ranks: int, script: Path) -> float:
    """One whole run, from the shell's point of view."""
    words = [sys.executable, "-m", module, "--nproc-per-node", str(num_ranks), str(script)]
    environment = {**os.environ, **ONE_THREAD, "PYTHONSAFEPATH": "1"}
    begin = time.perf_counter()
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module}: exit code {done.returncode}\n{done.stderr}")
    return time.perf_counter() - begin


def measure(num_ranks: int, rounds: int) -> Row:
    """The ratio of neighbouring turns; who goes first alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in MODULES}
    with tempfile.TemporaryDirectory() as folder, Watch() as watch:
        script = Path(folder, "meet.py")
        script.write_text(SCRIPT)
        for module in MODULES.values():  # the file cache, once
            seconds_of(module, 1, script)
        for turn in range(rounds):
            names = list(MODULES) if turn % 2 == 0 else list(reversed(MODULES))
            for name in names:
                seconds[name].append(seconds_of(MODULES[name], num_ranks, script))
    ours, theirs = seconds["xds"], seconds["torchrun"]
    middle = sorted(ours)[rounds // 2]
    return ratio_row(
        f"start of {num_ranks} ranks / torchrun",
        ours,
        theirs,
        must=MUST,
        note=f"{middle:.2f} s",
        samples=seconds,
        others_busy=watch.others,
    )


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quiet-minutes", type=float, default=0.0, help="wait for a quiet machine")
    parser.add_argument("--no-save", action="store_true")
    asked = parser.parse_args()
    wait_until_quiet(asked.quiet_minutes)
    return finish(FOLDER, [measure(asked.ranks, asked.rounds)], keeps=not asked.no_save)


if __name__ == "__main__":
    sys.exit(main())
