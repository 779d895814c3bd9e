"""Experts on E of N ranks against one process: losses, norms and parameters of 5 steps of SGD.

    python benchmarks/experts/matrix.py [--only NAME] [--bits]

Every model of tests/experts/test_shared_experts.py, N = 1, 2, 4, every E that divides N, stages 0 to 3. The
norms of MuseSpark, whose experts end in a norm, round by more than 1e-6 in fp32. --bits: under
`torch.use_deterministic_algorithms`, the bits of each E against E = 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "experts")]
import test_shared_experts as cases  # noqa: E402
from helpers import run_ranks  # noqa: E402

SIZES = {1: (1,), 2: (1, 2), 4: (1, 2, 4)}
MUST = 1e-6


def difference(wanted: Any, ranks: Any) -> tuple[float, float]:
    """The largest relative difference of losses and norms, and the largest one of parameters."""
    (steps, params), (own_steps, own_params) = wanted, ranks[0]
    worst = 0.0
    for number, (loss, norm) in enumerate(steps):
        mean = sum(found[number][0] for found, _ in ranks) / len(ranks)
        worst = max(worst, abs(mean - loss) / loss, abs(own_steps[number][1] - norm) / norm)
    apart = max(float((own_params[key] - value).abs().max()) for key, value in params.items())
    return worst, apart


def bits(name: str) -> bool:
    """Whether each E gives the losses and parameters of E = 1, bit for bit, where E is 1 or N."""
    equal = True
    for world_size, sizes in SIZES.items():
        first: Any = None
        for size in sizes:
            ranks = run_ranks(cases.trained, world_size, name, 2, size, True)
            found = [[loss for loss, _ in steps] for steps, _ in ranks], ranks[0][1]
            first = first or found
            same = found[0] == first[0] and all(
                torch.equal(value, first[1][key]) for key, value in found[1].items()
            )
            print(f"{name}, {world_size} ranks, E = {size}: {'equal' if same else 'other'} bits")
            equal = equal and (same or size not in (1, world_size))
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="one model")
    parser.add_argument("--bits", action="store_true")
    args = parser.parse_args()
    cases.STEPS = 5
    failed = False
    for name in [args.only] if args.only else cases.MODELS:
        if args.bits:
            failed |= not bits(name)
            continue
        worst, apart, runs = 0.0, 0.0, 0
        for world_size, sizes in SIZES.items():
            wanted = cases.plain(name, world_size)
            for stage in range(4):
                for size in sizes:
                    ranks = run_ranks(cases.trained, world_size, name, stage, size)
                    found = difference(wanted, ranks)
                    worst, apart, runs = max(worst, found[0]), max(apart, found[1]), runs + 1
        failed |= worst > MUST
        print(
            f"{name}: {runs} runs, losses and norms {worst:.1e}, parameters {apart:.1e}", flush=True
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
