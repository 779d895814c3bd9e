"""Damage a checkpoint in 1,000 ways, and check that two ranks refuse each one and can fall back.

    python benchmarks/checkpoint/corruption.py [--trials 1000]

The damages: a flipped bit, a truncated file, two swapped shards, a deleted file, a file of another checkpoint.
The last of three checkpoints is damaged and loaded with the layout it was saved with. The load must raise with
the name of the file and change nothing. With fallback=True the previous checkpoint is loaded, bit for bit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]
import helpers  # noqa: E402
from corruption_trials import corrupt_often  # noqa: E402
from harness import machine  # noqa: E402


def main() -> int:
    """Run the trials and keep the results; 1 if a damage was not refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    helpers.TIMEOUT_SECONDS = 3600
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = helpers.run_ranks(corrupt_often, 2, folder, options.trials, options.seed)
    if found[0] != found[1]:
        found[0]["problems"].append("the two ranks saw different things")
    print("| damage: what came of it | trials |\n|---|---|")
    for outcome, count in sorted(found[0]["outcomes"].items()):
        print(f"| {outcome} | {count} |")
    print(*found[0]["problems"], sep="\n")
    about = machine()
    words = about["cpu"].lower().replace("(r)", "").split()[:2]
    today = datetime.date.today().isoformat()
    path = HERE / "results" / f"{today}-corruption-{os.cpu_count()}-core-{'-'.join(words)}.json"
    path.parent.mkdir(exist_ok=True)
    content = {"date": today, "machine": about, "trials": options.trials, **found[0]}
    content["seconds"] = round(time.monotonic() - start)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(f"results: {path.relative_to(HERE.parents[1])}")
    return 1 if found[0]["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
