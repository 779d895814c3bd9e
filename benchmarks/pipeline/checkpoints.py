"""Save a model cut over any ranks and load it cut over any others, 500 times, and compare every bit.

    python benchmarks/pipeline/checkpoints.py [--loads 500] [--seed 0]

The cuts are pipe 1, 2, 4 x data 1, 2 x tensor 1, 2, 4, at most 8 ranks, x ZeRO stage 0 to 3 x fp32, bf16, of a
model with a tied weight and without, with frozen blocks and without, with layers whose slices are uneven. Each
load compares masters, frozen values, buffers, optimizer states, random generators, learning rates, steps and
the loader's position on every rank.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests")]
from pipeline_checkpoints import random_loads  # noqa: E402


def main() -> int:
    """Run the loads; 1 if one of them differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start, count, wrong = time.monotonic(), 0, 0
    pairs = set()
    with tempfile.TemporaryDirectory() as folder:
        for tag, cut, problems in random_loads(folder, options.loads, options.seed):
            count, wrong = count + 1, wrong + bool(problems)
            pairs.add((tag, cut))
            if problems:
                print(f"{tag} at {cut.tag}: {problems[:3]}")
    print("| loads | different pairs of cuts | bit-equal | seconds |\n|---|---|---|---|")
    print(f"| {count} | {len(pairs)} | {count - wrong} | {time.monotonic() - start:.0f} |")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
