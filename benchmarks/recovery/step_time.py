"""The time of a step with recovery over that without it, where no rank fails: turns of A B A B.

    python benchmarks/recovery/step_time.py --pairs 4 --stage 2 --mics 2 --ranks 4
    python benchmarks/recovery/step_time.py --pairs 4 --stage 2 --rows 32    one copy of the states
    python benchmarks/recovery/step_time.py --pairs 4 --stage 2 --rows 32 --hosts 2    and one on the next host
    python benchmarks/recovery/step_time.py --turns 10 --stage 2 --rows 64 --hosts 2 --steps 620

Each turn is a run of its own. A figure is the ratio of the median steps of two neighbouring turns; the first
steps do not count. With --turns there is one run, and steps of it in turn keep no copy, one, and a second one:
runs differ from each other by more than a copy costs. What recovery costs beside copies is then in all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")
NUM_FIRST = 20  # that do not count


def step_of(out: Path, *, recovers: bool, ranks: int, steps: int) -> tuple[float, float]:
    """The median step of rank 0 of a run in seconds: by the wall clock, and of its processor."""
    out.mkdir()
    environ = {**os.environ, "OUT": str(out), "STEPS": str(steps), "RECOVERY": str(int(recovers))}
    environ |= {"OMP_NUM_THREADS": "1", "SAVE_EVERY": str(10 * steps)}
    words = [str(Path(sys.executable).with_name("xds")), *["--recover"][: int(recovers)]]
    words += ["--nproc-per-node", str(ranks), "--log-dir", str(out / "logs"), str(TRAIN)]
    subprocess.run(words, env=environ, check=True, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    lines = [json.loads(line) for line in (out / "unit0.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "step" in line][NUM_FIRST:]
    return median_of(rows)


def median_of(rows: Sequence[dict[str, float]]) -> tuple[float, float]:
    """The median of the steps after the first row: by the wall clock, and of the processor, in seconds."""
    wall, cpu = (
        statistics.median(b[key] - a[key] for a, b in pairwise(rows)) for key in ("seconds", "cpu")
    )
    return wall, cpu


def compare_turns(out: Path, turn_steps: int, ranks: int, steps: int) -> None:
    """Print the ratio of turns with one copy and with both over the nearest turns with none."""
    step_of(out, recovers=True, ranks=ranks, steps=steps)
    lines = [json.loads(line) for line in (out / "unit0.jsonl").read_text().splitlines()]
    rows = {line["step"]: line for line in lines if "step" in line}
    turns = {
        number: median_of([rows[number * turn_steps + n] for n in range(turn_steps + 1)])
        for number in range(-(-NUM_FIRST // turn_steps), steps // turn_steps)
    }
    for place, name in enumerate(("wall clock", "processor")):
        none = [turn[place] for number, turn in turns.items() if number % 3 == 0]
        print(f"{name}, a step without a copy: {1000 * statistics.median(none):.1f} ms")
        for copies in (1, 2):
            ratios = []
            for number, turn in turns.items():
                near = [number - copies, number - copies + 3]
                if number % 3 == copies and all(other in turns for other in near):
                    ratios.append(2 * turn[place] / sum(turns[other][place] for other in near))
            ratios.sort()
            print(
                f"{name}, copies {copies} over none: median {statistics.median(ratios):.3f} "
                f"({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} turns)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument(
        "--rows", type=int, default=2, help="samples of a micro-batch, of 32 tokens"
    )
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--mics", type=int, default=1)
    parser.add_argument(
        "--hosts", type=int, default=1, help="pretended on this machine: with a second copy"
    )
    parser.add_argument("--turns", type=int, default=0, help="steps of a turn of one run")
    args = parser.parse_args()
    os.environ |= {"STAGE": str(args.stage), "MICS": str(args.mics), "WIDTH": str(args.width)}
    os.environ["HOSTS"] = str(args.hosts)
    os.environ["ROWS"] = str(args.rows)
    folder = Path(tempfile.mkdtemp(prefix="step-time-"))
    if args.turns:
        os.environ["TURNS"] = str(args.turns)
        compare_turns(folder / "turns", args.turns, args.ranks, args.steps)
        return
    turns = []
    for number in range(2 * args.pairs):
        turn = step_of(
            folder / str(number), recovers=number % 2 == 1, ranks=args.ranks, steps=args.steps
        )
        turns.append(turn)
        wall, cpu = (1000 * seconds for seconds in turn)
        print(f"{'AB'[number % 2]} {wall:.2f} ms, {cpu:.2f} ms of the processor", flush=True)
    for place, name in enumerate(("wall clock", "processor")):
        column = [turn[place] for turn in turns]
        ratios = [b / a for a, b in zip(column[::2], column[1::2], strict=True)]
        ratios += [b / a for a, b in zip(column[2::2], column[1::2], strict=False)]
        found = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
        middle = statistics.median(ratios)
        print(f"{name}, with recovery over without: median {middle:.3f} ({found})")


if __name__ == "__main__":
    main()
