"""Compare the time of a training step on two tensor ranks with torch's `parallelize_module`.

    python benchmarks/tensor/step.py [--only PATTERN] [--rounds N] [--quick] [--patience MINUTES]

Contestants share two gloo processes of one thread and alternate. A row is the median of the ratios of
neighbouring turns. Their losses must agree; otherwise the row is invalid.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from harness import (  # noqa: E402
    Plan,
    RankFailed,
    Row,
    Watch,
    alternate,
    finish,
    ratio_row,
    run_ranks,
    slowest,
    wait_until_quiet,
)

TOLERANCE = 1e-4  # relative, of the last turn's loss
OURS, PEER = "xds", "DTensor"
LR = 1e-4


@dataclass(frozen=True)
class Comparison:
    """One size of model, and the required ratio."""

    size: str
    must: float
    aim: float
    plan: Plan

    @property
    def name(self) -> str:
        """Of the row."""
        return f"step, tensor = 2, {self.size} fp32: {OURS} / {PEER}"


COMPARISONS = [
    Comparison("tiny", 0.5, 0.2, Plan(rounds=11, block=20, warmup=10)),
    Comparison("40M", 1.0, 0.85, Plan(rounds=11, block=1)),
]


def _xds(size: str) -> Callable[[Any], Any]:
    """A step of this engine."""
    from model import CUTS, build

    import xds

    optimizer = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": optimizer,
        "zero_optimization": {"stage": 0},
        "tensor_parallel": {"tp_size": 2, "plan": {f"blocks.*.{k}": v for k, v in CUTS.items()}},
    }
    engine = xds.initialize(build(size), config)

    def step(tokens: Any) -> Any:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _dtensor(size: str) -> Callable[[Any], Any]:
    """A step of torch's slices, with its fused AdamW."""
    import torch
    from model import CUTS, build
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = build(size)
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {f"blocks.*.{k}": styles[v]() for k, v in CUTS.items()})
    sliced = [param for param in model.parameters() if isinstance(param, DTensor)]
    whole = [param for param in model.parameters() if not isinstance(param, DTensor)]
    optimizers = [
        torch.optim.AdamW(group, lr=LR, weight_decay=0.01, fused=True) for group in (sliced, whole)
    ]

    def step(tokens: Any) -> Any:
        loss = model(tokens)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def time_contestants(_: int, __: int, comparison: Comparison) -> dict[str, Any]:
    """One rank's part: build both contestants, alternate them."""
    from model import make_batches

    plan = comparison.plan
    batches = make_batches(comparison.size, plan.warmup + plan.rounds * plan.block)
    built = {PEER: _dtensor(comparison.size), OURS: _xds(comparison.size)}
    seconds, losses = alternate({k: partial(_step, v, batches) for k, v in built.items()}, plan)
    return {"seconds": seconds, "losses": losses}


def _step(step: Callable[[Any], Any], batches: Any, index: int) -> Any:
    return step(batches[index])


def row_of(comparison: Comparison) -> Row:
    """Run a comparison."""
    row = Row(comparison.name, must=comparison.must, aim=comparison.aim)
    try:
        with Watch() as watch:
            ranks = run_ranks(time_contestants, 2, comparison)
    except RankFailed as error:
        print(error, flush=True)
        row.void = f"FAIL ({str(error).strip().splitlines()[-1]})"
        return row
    row.others_busy = watch.others
    row.samples = slowest([rank["seconds"] for rank in ranks])
    measured = ratio_row(row.name, row.samples[OURS], row.samples[PEER])
    row.value, row.low, row.high = measured.value, measured.low, measured.high
    row.note = (
        " / ".join(f"{statistics.median(row.samples[k]) * 1e3:.1f}" for k in (OURS, PEER)) + " ms"
    )
    block = comparison.plan.block
    a, b = (statistics.fmean(ranks[0]["losses"][name][-block:]) for name in (OURS, PEER))
    if not abs(a - b) <= TOLERANCE * abs(b):
        row.void = f"VOID (loss {a:.6f}, {PEER} {b:.6f})"
    return row


def main() -> int:
    """Run the chosen comparisons; 1 if a row misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="rows whose name matches, such as '*tiny*'")
    parser.add_argument("--rounds", type=int, help="turns of each contestant (default: 11)")
    parser.add_argument("--quick", action="store_true", help="tiny, 3 rounds; keeps nothing")
    help_text = "before each comparison, wait so long for others to leave the machine alone"
    parser.add_argument("--patience", type=float, default=0, metavar="MINUTES", help=help_text)
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    rows = []
    for comparison in COMPARISONS[:1] if options.quick else COMPARISONS:
        chosen = comparison
        if rounds:
            chosen = replace(chosen, plan=replace(chosen.plan, rounds=rounds))
        if fnmatch.fnmatch(chosen.name, options.only):
            wait_until_quiet(options.patience)
            rows.append(row_of(chosen))
    return finish(HERE, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
