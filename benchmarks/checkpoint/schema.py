"""Change the contents of 5,000 checkpoints with correct checksums, and check how verify and load handle each.

    python benchmarks/checkpoint/schema.py [--trials 5000]

Four of five run on one rank, the others on two. A value of the manifest is removed, repeated, renamed or
replaced by a hostile one; so are those of a file's header, and the bytes of small tensors. A refusal is one
sentence and changes nothing. A checkpoint that passes `xds checkpoint verify` loads, or does not match the
engine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]
import helpers  # noqa: E402
from harness import machine  # noqa: E402
from manifest_trials import try_often  # noqa: E402


def main() -> int:
    """Run the trials and keep the results; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    helpers.TIMEOUT_SECONDS = 3600
    start = time.monotonic()
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    on_two = options.trials // 5
    for world_size, share in ((1, options.trials - on_two), (2, on_two)):
        with tempfile.TemporaryDirectory() as folder:
            found = helpers.run_ranks(
                try_often, world_size, folder, share, options.seed + world_size
            )
        outcomes.update(found[0]["outcomes"])
        problems += [problem for one in found for problem in one["problems"]]
        if any(_loads(one) != _loads(found[0]) for one in found):
            problems.append("the two ranks saw different things")
    print("| verify: load | trials |\n|---|---|")
    for outcome, count in sorted(outcomes.items()):
        print(f"| {outcome} | {count} |")
    print(*problems, sep="\n")
    about = machine()
    words = about["cpu"].lower().replace("(r)", "").split()[:2]
    today = datetime.date.today().isoformat()
    path = HERE / "results" / f"{today}-schema-{os.cpu_count()}-core-{'-'.join(words)}.json"
    path.parent.mkdir(exist_ok=True)
    content = {"date": today, "machine": about, "trials": options.trials}
    content |= {"outcomes": dict(outcomes), "problems": problems}
    content["seconds"] = round(time.monotonic() - start)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(f"results: {path.relative_to(HERE.parents[1])}")
    return 1 if problems else 0


def _loads(found: dict[str, dict[str, int]]) -> int:
    """How many loads succeeded, for any result of verify; the same on every rank."""
    return sum(count for outcome, count in found["outcomes"].items() if outcome.endswith("loaded"))


if __name__ == "__main__":
    sys.exit(main())
