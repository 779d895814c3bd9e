"""An hour of failures: a toy GPT on four hosts, elastic between 2 and 4, with a failure about every 15 s.

    python benchmarks/launcher/soak.py [--seconds 3600] [--stage 3]

tests/soak_runs.py implements it. Every row must be 0, except those that are for information only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parents[1] / "tests")]

from harness import Row, finish  # noqa: E402
from real_hosts import why_not  # noqa: E402
from soak_runs import Plan, Tally, soak  # noqa: E402

STEP_SECONDS = 0.5
SHARE_OF_STEPS = 0.3  # of the time; the rest is starting again


def rows_of(tally: Tally, plan: Plan) -> list[Row]:
    """The rows of the table."""
    minutes = f"{tally.seconds / 60:.0f} min, stage {plan.stage}"
    hurts = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.hurts.items()))
    sizes = ", ".join(f"{count} on {size}" for size, count in sorted(tally.world_sizes.items()))
    low, high = min(tally.undisturbed), max(tally.undisturbed)
    rows = [
        Row(
            f"problems of a soak, {minutes}",
            len(tally.problems),
            must=0,
            unit="",
            note="; ".join(tally.problems)[:300] or "none",
        ),
        Row(f"failures, {minutes}", tally.hurts.total(), unit="", note=hurts),
        Row(
            f"starts of all ranks, {minutes}",
            tally.starts,
            unit="",
            note=f"{tally.steps_done} steps for {plan.num_steps}: {sizes} ranks",
        ),
        Row(
            f"final loss, {minutes}",
            tally.final_loss,
            must=2 * high - low,
            unit="",
            note=f"undisturbed seeds end at {low:.4f} to {high:.4f}",
        ),
    ]
    if tally.restart_seconds:
        seconds = tally.restart_seconds
        middle = statistics.median(seconds)
        note = "SIGSTOP waits for the timeout of a collective, a cut link for the heartbeat"
        name = f"failure to the next step, {minutes}"
        rows.append(Row(name, middle, min(seconds), max(seconds), unit=" s", note=note))
    growth = [after.mib - before.mib for before, after in tally.growth.values()]
    if growth:
        name = f"growth of a head or node part, at most, {minutes}"
        rows.append(Row(name, max(growth), must=48, unit=" MiB", note="files, threads as well"))
    return rows


def main() -> int:
    """Run the soak test, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between failures")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--no-save", action="store_true")
    asked = parser.parse_args()
    if why_not():
        print(f"skipped: {why_not()}")
        return 0
    plan = Plan(
        seconds=asked.seconds,
        every_seconds=asked.every,
        stage=asked.stage,
        seed=asked.seed,
        num_steps=int(asked.seconds * SHARE_OF_STEPS / STEP_SECONDS),
        step_seconds=STEP_SECONDS,
        is_ruthless=True,
        longest_cut_seconds=60.0,
    )
    print(f"seed {plan.seed}, {plan.num_steps} steps", flush=True)
    tally = soak(plan, lambda text: print(time.strftime("%H:%M:%S"), text, flush=True))
    for problem in tally.problems:
        print(problem)
    return finish(FOLDER, rows_of(tally, plan), keeps=not asked.no_save)


if __name__ == "__main__":
    sys.exit(main())
