"""The order of NCCL calls of random products of features, on ranks of docs/design/gpu-rehearsal.md.

    python benchmarks/fuzz/orders.py --count 200 --first 0

What is compared is in tests/rehearsal/orders.py.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS / "rehearsal"), str(TESTS)]

from device_ranks import stop_ranks  # noqa: E402
from orders import examined  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=200, help="products (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    outcomes: Counter[str] = Counter()
    for seed in range(given.first, given.first + given.count):
        outcome, said = examined(seed)
        outcomes[outcome] += 1
        if outcome in ("wrong", "failed"):
            print(f"seed {seed}: {outcome}: {said}", flush=True)
    stop_ranks()
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())))
    return int(outcomes["wrong"] + outcomes["failed"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
