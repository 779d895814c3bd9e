"""Random routings of tokens to experts on several ranks against one process, hostile ones too.

    python benchmarks/experts/routings.py [--count N] [--first SEED]

Outputs, gradients of tokens, weights and experts, and the number of rows sent are compared. The cases are drawn
by tests/experts/random_routings.py, of which the tests run the first 60.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "experts")]
from random_routings import compare  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="cases")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    args = parser.parse_args()
    start, kinds, wrong = time.monotonic(), Counter[str](), 0
    for seed in range(args.first, args.first + args.count):
        try:
            kinds[compare(seed).kind] += 1
        except AssertionError as error:
            wrong += 1
            print(f"seed {seed}: {error}", flush=True)
    print(f"{args.count} routings, {wrong} wrong, {time.monotonic() - start:.0f} s: {dict(kinds)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
