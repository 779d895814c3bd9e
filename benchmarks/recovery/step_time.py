"""The time of a step with recovery over that without it, where no rank fails: turns of A B A B.

    python benchmarks/recovery/step_time.py --pairs 4 --stage 2 --mics 2 --ranks 4

Each turn is a run of its own. A figure is the ratio of the median steps of two neighbouring turns; the first
steps do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")
NUM_FIRST = 20  # that do not count


def median_seconds(out: Path, *, recovers: bool, ranks: int, steps: int) -> float:
    """Of the steps of a run, on unit 0; saves are between two of them."""
    out.mkdir()
    environ = {**os.environ, "OUT": str(out), "STEPS": str(steps), "RECOVERY": str(int(recovers))}
    environ |= {"OMP_NUM_THREADS": "1", "SAVE_EVERY": str(10 * steps)}
    words = [str(Path(sys.executable).with_name("xds")), *["--recover"][: int(recovers)]]
    words += ["--nproc-per-node", str(ranks), "--log-dir", str(out / "logs"), str(TRAIN)]
    subprocess.run(words, env=environ, check=True, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    lines = [json.loads(line) for line in (out / "unit0.jsonl").read_text().splitlines()]
    times = [line["seconds"] for line in lines if "step" in line][NUM_FIRST:]
    return statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--mics", type=int, default=1)
    args = parser.parse_args()
    os.environ |= {"STAGE": str(args.stage), "MICS": str(args.mics), "WIDTH": str(args.width)}
    folder = Path(tempfile.mkdtemp(prefix="step-time-"))
    turns = []
    for number in range(2 * args.pairs):
        seconds = median_seconds(
            folder / str(number), recovers=number % 2 == 1, ranks=args.ranks, steps=args.steps
        )
        turns.append(seconds)
        print(f"{'AB'[number % 2]} {1000 * seconds:.2f} ms", flush=True)
    ratios = [b / a for a, b in zip(turns[::2], turns[1::2], strict=True)]
    ratios += [b / a for a, b in zip(turns[2::2], turns[1::2], strict=False)]
    found = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
    print(f"with recovery over without: median {statistics.median(ratios):.3f} ({found})")


if __name__ == "__main__":
    main()
