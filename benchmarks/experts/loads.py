"""Random cuts of a mixture of experts: what one saves, another one loads bit for bit.

    python benchmarks/experts/loads.py [--count N] [--first SEED] [--tensor]

Parameters, optimizer states, buffers, counters, data positions and random generators are compared on all ranks.
A cut draws the ranks that share experts, data ranks, pipeline stages, the ZeRO stage, precision, where the
optimizer is, and whether a save is in the background; a load may be of the module alone. The cuts are drawn by
tests/experts/random_loads.py. --tensor: tensor ranks too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "experts")]
from random_loads import LOADS_OF_ONE, random_loads  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="loads")
    parser.add_argument("--first", type=int, default=0, help="the seed")
    parser.add_argument("--tensor", action="store_true", help="also with two tensor ranks")
    args = parser.parse_args()
    start, loads, wrong = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for texts in random_loads(folder, args.count, args.first, (1, 2) if args.tensor else (1,)):
            loads += LOADS_OF_ONE
            wrong += bool(texts)
            for text in texts[:5]:
                print(text, flush=True)
    print(f"{loads} loads, {wrong} groups wrong, {time.monotonic() - start:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
