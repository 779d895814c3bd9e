"""Trains small models over pipe x data x sequence x tensor ranks, and compares each with one process.

    python benchmarks/tensor/matrix.py [--only TEXT] [--seconds 1800]

Prints the largest relative difference of loss and norm over five steps of each case. Tensor ranks must agree to
the last bit. Source of the cases: tests/tensor_cases.py. Ends with 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from tensor_cases import Case, examine, matrix


def _examined(case: Case) -> tuple[float, list[str]]:
    try:
        return examine(case)
    except (AssertionError, OSError, EOFError) as failure:
        return float("nan"), [str(failure).strip().splitlines()[-1]]


def main() -> int:
    """Run the cases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--without", default="-", help="leave out cases of the axis: sequence")
    parser.add_argument("--seconds", type=float, default=1800.0, help="begin no case after this")
    options = parser.parse_args()
    cases = [case for case in matrix() if options.only in case.name]
    cases = [case for case in cases if getattr(case, options.without, 1) == 1]
    start, num_run, num_wrong, largest = time.monotonic(), 0, 0, 0.0
    for case in sorted(cases, key=lambda case: case.mesh.size):
        if time.monotonic() - start > options.seconds:
            break
        difference, wrong = _examined(case)
        num_run, num_wrong = num_run + 1, num_wrong + bool(wrong)
        largest = max(largest, difference)
        print(f"{case.name:24} {difference:8.1e}  {'; '.join(wrong)[:200] or 'equal'}", flush=True)
    print(f"{num_run} of {len(cases)} cases run, {num_wrong} wrong; largest {largest:.1e}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
