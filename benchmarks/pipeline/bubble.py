"""Compare the waiting time of pipelines whose stages sleep with the formula of their schedule.

    python benchmarks/pipeline/bubble.py [--only PATTERN] [--steps N] [--quick]

Stages sleep 20 ms for a forward, for the gradient of the input and for that of the weight; a rank with two
stages sleeps half of it in each. The bubble is (wall - m * work) / wall of the slowest rank, m micro-batches.
A row is the shortest of N steps: load from outside only adds to a step. The first step is left out; it sends
headers.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from harness import RankFailed, Row, Watch, finish, print_rows, run_ranks  # noqa: E402
from sleeping import TORCH, Case, time_cases  # noqa: E402

TOLERANCE = 0.02
ZERO_BUBBLE_MUST, ZBV_MUST = 0.37, 0.05
SCHEDULES = ("gpipe", "1f1b", TORCH, "interleaved_1f1b", "zero_bubble", "zbv")


def formula(case: Case) -> float:
    """The bubble of the papers: Narayanan et al. 2021 (section 2.2); Qi et al. 2023 (tables 1 and 4)."""
    p, m = case.ranks, case.count
    if case.schedule in ("gpipe", "1f1b", TORCH):
        return (p - 1) / (m + p - 1)
    if case.schedule == "interleaved_1f1b":
        return (p - 1) / (case.chunks * m + p - 1)
    return case.simulated_bubble


def row_of(case: Case, ranks: list[dict[str, Any]], busy: float | None) -> Row:
    """The bubble of one case."""
    tables = [max(step) for step in zip(*(rank["table"] for rank in ranks), strict=True)]
    wholes = [max(step) for step in zip(*(rank["whole"] for rank in ranks), strict=True)]
    work = case.work_seconds
    bubbles = [(wall - work) / wall for wall in tables]
    want = formula(case)
    must = want + TOLERANCE
    if case.schedule == "zbv" and case.count == 4 * case.ranks:
        must = min(must, ZBV_MUST)
    is_ours = case.schedule != TORCH
    row = Row(
        _name(case),
        min(bubbles),
        min(bubbles),
        max(bubbles),
        must=must if is_ours else None,
        unit="",
    )
    row.others_busy = busy
    row.samples = {"table": tables, "step": wholes}
    in_flight = [rank["in_flight"] for rank in ranks]
    row.note = (
        f"formula {want:.3f}; median {statistics.median(bubbles):.3f}; whole step "
        f"{(min(wholes) - work) / min(wholes):.3f}; {min(wholes) * 1e3:.0f} ms"
    )
    if is_ours and in_flight != case.simulated_in_flight:
        row.void = f"FAIL (in flight {in_flight}, not {case.simulated_in_flight})"
    p, m = case.ranks, case.count
    if case.schedule == "1f1b" and in_flight != [min(m, p - rank) for rank in range(p)]:
        row.void = f"FAIL (in flight {in_flight})"
    if row.value is not None and row.value < want - TOLERANCE:
        row.void = "VOID (less than the formula)"
    return row


def _name(case: Case) -> str:
    name = f"bubble, {case.schedule}, p = {case.ranks}, m = {case.count}"
    return name if case.seconds == Case.seconds else f"{name}, {case.seconds * 1e3:.0f} ms"


def zero_bubble_rows(rows: dict[Case, Row]) -> list[Row]:
    """The waiting seconds of zero-bubble over those of 1F1B, and the shares of the step over each other."""
    found = []
    for case, row in rows.items():
        plain = next(
            (c for c in rows if (c.schedule, c.ranks, c.count) == ("1f1b", *_numbers(case))), None
        )
        if case.schedule != "zero_bubble" or plain is None or not row.samples:
            continue
        waits = [min(rows[c].samples["table"]) - c.work_seconds for c in (case, plain)]
        ratio = Row(
            f"waiting of zero_bubble / 1f1b, p = {case.ranks}, m = {case.count}",
            waits[0] / waits[1],
            must=ZERO_BUBBLE_MUST,
            others_busy=row.others_busy,
        )
        ratio.note = f"{waits[0] * 1e3:.1f} / {waits[1] * 1e3:.1f} ms; without messages 0.333x"
        found.append(ratio)
    return found


def _numbers(case: Case) -> tuple[int, int]:
    return case.ranks, case.count


def run(cases: list[Case]) -> dict[Case, Row]:
    """The rows of cases with one number of ranks."""
    if not cases:
        return {}
    try:
        with Watch() as watch:
            ranks = run_ranks(time_cases, cases[0].ranks, cases)
    except RankFailed as error:
        print(error, flush=True)
        return {case: Row(_name(case), must=0.0, void="FAIL (a rank failed)") for case in cases}
    return {
        case: row_of(case, [rank[index] for rank in ranks], watch.others)
        for index, case in enumerate(cases)
    }


def main() -> int:
    """Run the chosen cases; 1 if a row misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", default="*", help="rows whose name matches, such as '*zbv, p = 4*'"
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8], help="numbers of ranks")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case")
    parser.add_argument(
        "--seconds", type=float, default=Case.seconds, help="of each third of the work"
    )
    parser.add_argument("--quick", action="store_true", help="2 ranks, m = 4; keeps nothing")
    options = parser.parse_args()
    rows: dict[Case, Row] = {}
    for ranks in [2] if options.quick else options.ranks:
        counts = (4,) if options.quick else [ranks * times for times in (1, 2, 4, 8)]
        rest = options.steps, options.seconds
        cases = [Case(name, ranks, count, *rest) for count in counts for name in SCHEDULES]
        found = run([case for case in cases if fnmatch.fnmatch(_name(case), options.only)])
        print_rows(list(found.values()))
        rows |= found
    return finish(HERE, [*rows.values(), *zero_bubble_rows(rows)], keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
