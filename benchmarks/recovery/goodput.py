"""Goodput of a run of which a rank is killed every 15 s, and replaced by a spare.

    python benchmarks/recovery/goodput.py --kills 6

- In samples: what was trained, over what the ranks that were there could have trained in that time. A step with
  all ranks takes the mean of those that are not beside a kill, and ranks that are left share its samples. So a
  rank that is not there counts as no capacity; stalls, repeated steps, and the time that spares take are lost.
- In time: the share after the first forward that is neither a stall nor a repeated step, by the ledger.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from xds.launcher.reporting.records import read_run

TRAIN = Path(__file__).with_name("train.py")
WARM_UP = 10  # steps that do not count
BESIDE_SECONDS = 4.0  # of a kill: other steps tell how long one takes


def last_process(out: Path, rank: int) -> int:
    """The process id of `rank`; 0 before it has built its engine."""
    path = out / f"unit{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    starts = [json.loads(line)["start"] for line in lines if '"start"' in line]
    return starts[-1] if starts else 0


def is_alive(pid: int) -> bool:
    """It runs, and is no zombie."""
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] not in "ZX"


def over_capacity(out: Path, ranks: int, killed_seconds: list[float]) -> float:
    """Steps over those that the ranks which were there could have taken. Each step has as many samples."""
    first: dict[
        int, tuple[float, int]
    ] = {}  # by step: when a rank said so first, and how many there were
    for path in out.glob("unit*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "world" in record:
                said = record["seconds"], record["world"]
                first[record["step"]] = min(said, first.get(record["step"], said))
    rows = sorted(first.values())
    pairs = list(pairwise(rows))[WARM_UP:]
    quiet = [
        after - before
        for (before, _), (after, world) in pairs
        if world == ranks and all(abs(after - at) > BESIDE_SECONDS for at in killed_seconds)
    ]
    whole_seconds = statistics.mean(quiet)
    possible = sum((b - a) / whole_seconds * world / ranks for (a, _), (b, world) in pairs)
    return len(pairs) / possible


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--rows", type=int, default=32, help="samples of a micro-batch, of 32 tokens"
    )
    parser.add_argument("--every-seconds", type=float, default=15.0)
    args = parser.parse_args()
    out = Path(tempfile.mkdtemp(prefix="goodput-"))
    environ = {**os.environ, "OUT": str(out), "STEPS": "1000000", "OMP_NUM_THREADS": "1"}
    environ |= {"REPORT": str(out / "report"), "ROWS": str(args.rows), "SAVE_EVERY": "1000000"}
    killed_seconds = []
    words = [str(Path(sys.executable).with_name("xds")), "--recover", "--spares", "1"]
    words += ["--nproc-per-node", str(args.ranks), "--log-dir", str(out / "logs"), str(TRAIN)]
    with open(out / "output.txt", "w") as output:
        run = subprocess.Popen(words, env=environ, stdout=output, stderr=subprocess.STDOUT)
        while not all(last_process(out, rank) for rank in range(args.ranks)):
            time.sleep(0.1)
        for _ in range(args.kills):
            time.sleep(args.every_seconds)
            pids = [last_process(out, rank) for rank in range(args.ranks)]
            killed_seconds.append(time.time())
            os.kill(random.choice([pid for pid in pids if is_alive(pid)]), signal.SIGKILL)
        time.sleep(args.every_seconds)
        run.send_signal(signal.SIGTERM)
        run.wait()
    found = read_run(str(out / "report"))
    spent = {name: seconds for name, seconds in found.ledger.items() if seconds}
    trained = sum(spent.values()) - spent.get("start", 0.0)
    lost = spent.get("stall", 0.0) + spent.get("repeated", 0.0)
    for each in found.failures:
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in each.seconds.items())
        print(f"{each.text}: {seconds}")
    print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in spent.items()))
    print(f"{len(found.steps)} steps, {args.kills} kills, goodput in time {1 - lost / trained:.1%}")
    found_share = over_capacity(out, args.ranks, killed_seconds)
    print(f"goodput in samples, over the capacity that was there: {found_share:.1%}")


if __name__ == "__main__":
    main()
