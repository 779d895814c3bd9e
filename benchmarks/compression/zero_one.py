"""Measure whole runs of 0/1 Adam: bytes over those of AdamW, and the final loss of the GPT example.

    python benchmarks/compression/zero_one.py [--quick]

- `stage 0`: with local steps, of at most 16 between two synchronisations; and without.
- `stage 1`: without, as it must be there.

The variance sees fewer and fewer of the first 18 % of the steps; that of 1-bit Adam in main.py sees them all.
The settings are those of the GPT example: its learning rate, schedule and weight decay.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "examples" / "gpt")]
from harness import Row, finish, run_ranks  # noqa: E402
from main import FREEZE, SEEDS, STEPS, batches, example_config, gpt  # noqa: E402

EXACT = "AdamW, stage 0"
CASES = {
    EXACT: (0, None),
    "0/1 Adam, stage 0, local steps": (0, 16),
    "0/1 Adam, stage 0": (0, 1),
    "0/1 Adam, stage 1": (1, 1),
}


def config_for(name: str, steps: int) -> dict[str, Any]:
    """The JSON of a case, for a run of so many steps."""
    stage, clipper = CASES[name]
    if clipper is None:
        return example_config(stage, steps, "AdamW")
    params = {
        "var_freeze_step": steps * FREEZE // STEPS,
        "var_update_scaler": 2,
        "local_step_scaler": max(1, steps // 15),
        "local_step_clipper": clipper,
    }
    return example_config(stage, steps, "ZeroOneAdam", **params)


def train(rank: int, world_size: int, cases: list[tuple[str, int]], steps: int) -> Any:
    """For each case (name, seed): the final validation loss, and the bytes that this rank sent."""
    import torch
    from data import load_text

    import xds

    _, held_out = load_text(None, 64)
    every = len(held_out) // 64
    pairs = [held_out[at * every] for at in range(64)]
    wanted = torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    found = []
    for name, seed in cases:
        torch.manual_seed(seed)
        engine = xds.initialize(gpt(64, 2), config_for(name, steps))
        source = batches(seed, rank, world_size)
        for _ in range(steps):
            engine.backward(engine(*next(source)))
            engine.step()
        sent = sum(engine.bytes_sent().values())
        xds.zero.get_full_param(next(engine.module.parameters()))  # the ranks synchronise
        engine.eval()
        with torch.no_grad():
            loss = float(engine(*wanted))
        found.append((loss, sent))
        engine.destroy()
    return found


def rows(quick: bool) -> list[Row]:
    """For each case its bytes and its loss."""
    seeds, steps = (range(1), 20) if quick else (range(SEEDS), STEPS)
    cases = [(name, seed) for name in CASES for seed in seeds]
    found = run_ranks(train, 2, cases, steps, timeout_seconds=7200)[0]
    made, highest, exact_bytes = [], 0.0, 0
    for at, name in enumerate(CASES):
        own = found[at * len(seeds) : (at + 1) * len(seeds)]
        losses, sent = [loss for loss, _ in own], own[0][1]
        is_exact = name == EXACT
        if is_exact:
            highest, exact_bytes = max(losses), sent
        else:
            row = Row(
                f"run of {steps} steps, {name}: bytes fewer",
                exact_bytes / sent,
                aim=10.0 if "local" in name else None,
                more_is_better=True,
                note=f"{sent} bytes; of {EXACT} {exact_bytes}",
            )
            made.append(row)
        made.append(
            Row(
                f"loss, {name}, {len(seeds)} seeds, {steps} steps",
                statistics.mean(losses),
                min(losses),
                max(losses),
                must=None if is_exact or quick else highest,
                unit="",
                note=", ".join(f"{loss:.3f}" for loss in losses),
                samples={"loss": losses},
            )
        )
    return made


def main() -> int:
    """Run all cases; 1 if a row misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small; keeps nothing")
    options = parser.parse_args()
    return finish(HERE, rows(options.quick), keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
