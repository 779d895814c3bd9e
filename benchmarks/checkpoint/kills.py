"""Kill ranks with SIGKILL at random moments of save loops, and check the checkpoints that remain.

    python benchmarks/checkpoint/kills.py [--kills 560] [--side-by-side 6] [--quick]

Claim: after every kill all checkpoints load, and none that was reported as saved is lost. Each scenario
has its own folder; after a kill the next two ranks resume from the newest checkpoint in it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]
from harness import machine  # noqa: E402
from kill_runs import Killer, Scenario, Tally  # noqa: E402

COLUMNS = ("scenario", "kills", "in a save", "committed, not yet told", "checked", "problems")


def scenarios() -> list[Scenario]:
    """All combinations of saves and kills; stages and sizes alternate."""
    found = []
    ways = itertools.product((False, True), (0, 2), (False, True), ("one", "all"))
    for number, (same_tag, keep_last, async_save, victims) in enumerate(ways):
        if same_tag and keep_last:
            continue  # there is only one folder
        # the last one writes around the page cache
        width, layers = ((16, 2), (256, 3), (1024, 3))[number // 2 % 3]
        stage = (number * 3 + number // 4) % 4
        found.append(Scenario(stage, width, layers, same_tag, keep_last, async_save, victims))
    for layout in ("pipeline", "slices", "offload", "experts"):
        for async_save, victims in ((False, "one"), (True, "all")):
            stage = {"offload": 3, "experts": 2}.get(layout, int(async_save))
            found.append(Scenario(stage, 256, 3, False, 2, async_save, victims, layout))
    return found


def kill_often(scenario: Scenario, kills: int, seed: int) -> Tally:
    # the first save in the background takes its memory
    killer = Killer(scenario, seed, window_seconds=1.0 if scenario.async_save else 0.3)
    for number in range(kills):
        killer.trial()
        if number % 5 == 4:
            killer.thin_out()
    return killer.finish()


def main() -> int:
    """Run all scenarios; 1 if any checkpoint was damaged or lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=560, help="in all")
    parser.add_argument("--side-by-side", type=int, default=6, help="scenarios at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="four kills each")
    options = parser.parse_args()
    every = scenarios()
    each = 4 if options.quick else -(-options.kills // len(every))
    start = time.monotonic()
    with ThreadPoolExecutor(options.side_by_side) as pool:
        seeds = range(options.seed, options.seed + len(every))
        tallies = list(pool.map(kill_often, every, [each] * len(every), seeds))
    rows = []
    for scenario, tally in zip(every, tallies, strict=True):
        counts = (tally.kills, tally.inside, tally.committed_unreported, tally.checked)
        rows.append((f"stage {scenario.stage}, {scenario.label}", *counts, len(tally.problems)))
    rows.append(("all", *(sum(row[at] for row in rows) for at in range(1, len(COLUMNS)))))
    show(rows)
    for tally in tallies:
        for problem in tally.problems:
            print(problem)
    print(f"{time.monotonic() - start:.0f} s; {machine()}")
    return 1 if any(tally.problems for tally in tallies) else 0


def show(rows: list[tuple[object, ...]]) -> None:
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for row in rows:
        print(f"| {' | '.join(str(cell) for cell in row)} |")


if __name__ == "__main__":
    sys.exit(main())
