"""Trains small models in pipeline stages in every way, and compares each with training without a pipeline.

    python benchmarks/pipeline/matrix.py [--only TEXT] [--seconds 600]

Prints the largest relative difference of loss and norm over the steps of each case. Source of the cases:
tests/pipeline_cases.py. Ends with 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from pipeline_cases import Case, examine, matrix


def _examined(case: Case) -> tuple[float, list[str]]:
    try:
        return examine(case)
    except AssertionError as failure:
        return float("nan"), [str(failure).strip().splitlines()[-1]]


def main() -> int:
    """Run the cases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no case after this")
    options = parser.parse_args()
    cases = [case for case in matrix() if options.only in case.name]
    start, num_run, num_wrong = time.monotonic(), 0, 0
    for case in sorted(cases, key=lambda case: case.world_size):
        if time.monotonic() - start > options.seconds:
            break
        difference, wrong = _examined(case)
        num_run, num_wrong = num_run + 1, num_wrong + bool(wrong)
        print(f"{case.name:50} {difference:8.1e}  {'; '.join(wrong) or 'equal'}", flush=True)
    print(f"{num_run} of {len(cases)} cases run, {num_wrong} wrong")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
