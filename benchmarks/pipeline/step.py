"""Compare the time of a training step in two pipeline stages with torch's 1F1B and with DeepSpeed.

    python benchmarks/pipeline/step.py [--only PATTERN] [--rounds N] [--quick]

Contestants of one comparison run in the same two processes and alternate. A row is the median of the ratios
of neighbouring turns. Their losses must agree; otherwise the row is invalid.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "step_time")]
from harness import (  # noqa: E402
    Plan,
    RankFailed,
    Row,
    Skip,
    Watch,
    alternate,
    finish,
    print_rows,
    ratio_row,
    run_ranks,
    slowest,
    wait_until_quiet,
)

FP32_TOLERANCE, BF16_TOLERANCE = 1e-4, 1e-2  # relative, of the last turn's loss
COMPUTE = "compute"
COUNT = 8  # micro-batches


@dataclass(frozen=True)
class Comparison:
    """Two contestants that alternate."""

    ours: str
    peer: str
    must: float
    aim: float
    bf16: bool = False
    size: str = "40M"
    plan: Plan = field(default_factory=lambda: Plan(rounds=9, block=1))

    @property
    def name(self) -> str:
        """Of the row."""
        return f"step, {self.size} {'bf16' if self.bf16 else 'fp32'}: {self.ours} / {self.peer}"


COMPARISONS = [
    Comparison(*contest, bf16=bf16)
    for bf16 in (False, True)
    for contest in (("xds-0", "torch", 1.02, 0.95), ("xds-1", "deepspeed-1", 0.90, 0.75))
]


def time_contestants(_: int, __: int, comparison: Comparison) -> dict[str, Any]:
    """One rank's part: build all contestants, alternate them."""
    from model import make_batches
    from pipelines import build

    plan = comparison.plan
    num_steps = plan.warmup + plan.rounds * plan.block
    windows = make_batches(comparison.size, 0, num_steps * COUNT)
    batches = [(window[:, :-1], window[:, 1:]) for window in windows]
    steps: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    busy: dict[str, list[float]] = {}
    for name in (comparison.peer, COMPUTE, comparison.ours):
        try:
            step = build(name, comparison.size, COUNT, comparison.bf16)
        except Skip as reason:
            skipped[name] = str(reason)
            continue
        busy[name] = []
        steps[name] = partial(_counted_step, step, batches, busy[name])
    seconds, losses = alternate(steps, plan)
    cpu = {name: found[plan.warmup :] for name, found in busy.items()}
    return {"seconds": seconds, "losses": losses, "skipped": skipped, "cpu": cpu}


def _counted_step(step: Any, batches: list[Any], busy: list[float], index: int) -> Any:
    """Run step `index`, and add the seconds of processor time that it took to `busy`."""
    start = time.process_time()
    loss = step(batches[index * COUNT :][:COUNT])
    busy.append(time.process_time() - start)
    return loss


def row_of(comparison: Comparison) -> Row:
    """Run a comparison."""
    row = Row(comparison.name, must=comparison.must, aim=comparison.aim)
    ours, peer = comparison.ours, comparison.peer
    try:
        with Watch() as watch:
            ranks = run_ranks(time_contestants, 2, comparison)
    except RankFailed as error:
        print(error, flush=True)
        row.void = f"FAIL ({str(error).strip().splitlines()[-1]})"
        return row
    row.others_busy = watch.others
    seconds = slowest([rank["seconds"] for rank in ranks])
    if peer not in seconds:
        row.void = f"SKIP ({ranks[0]['skipped'][peer]})"
        return row
    measured = ratio_row(row.name, seconds[ours], seconds[peer])
    row.value, row.low, row.high = measured.value, measured.low, measured.high
    row.samples = {name: seconds[name] for name in (ours, peer, COMPUTE)}
    compute = ratio_row("", seconds[COMPUTE], seconds[peer]).value
    cpu = slowest([rank["cpu"] for rank in ranks])
    row.samples |= {f"{name}, processor": cpu[name] for name in (ours, peer, COMPUTE)}
    processor = statistics.median(cpu[ours]) / statistics.median(cpu[peer])
    row.note = (
        f"{_ms(seconds[ours])} / {_ms(seconds[peer])} ms; compute alone {compute:.3f}x; processor time of the "
        f"busier rank {processor:.3f}x ({_ms(cpu[ours])} / {_ms(cpu[peer])} ms)"
    )
    losses = ranks[-1]["losses"]  # of the last stage
    block = comparison.plan.block
    a, b = (statistics.fmean(losses[name][-block:]) for name in (ours, peer))
    if not abs(a - b) <= (BF16_TOLERANCE if comparison.bf16 else FP32_TOLERANCE) * abs(b):
        row.void = f"VOID (loss {a:.6f}, {peer} {b:.6f})"
    return row


def _ms(samples: list[float]) -> str:
    return f"{statistics.median(samples) * 1e3:.1f}"


def main() -> int:
    """Run the chosen comparisons; 1 if a row misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="rows whose name matches, such as '*torch'")
    parser.add_argument("--rounds", type=int, help="turns of each contestant (default: 9)")
    parser.add_argument("--quick", action="store_true", help="11M, torch, 3 rounds; keeps nothing")
    help_text = "before each comparison, wait so long for others to leave the machine alone"
    parser.add_argument("--patience", type=float, default=0, metavar="MINUTES", help=help_text)
    options = parser.parse_args()
    rows = []
    for comparison in COMPARISONS:
        chosen = comparison
        if options.quick:
            if comparison.bf16 or comparison.peer != "torch":
                continue
            chosen = replace(comparison, size="11M", plan=Plan(rounds=3, block=1))
        if options.rounds:
            chosen = replace(chosen, plan=replace(chosen.plan, rounds=options.rounds))
        if fnmatch.fnmatch(chosen.name, options.only):
            wait_until_quiet(options.patience)
            rows.append(row_of(chosen))
            print_rows(rows[-1:])
    return finish(HERE, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
