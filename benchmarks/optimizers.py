"""Time of an update and bytes of states of each optimizer of the config, beside AdamW.

    python benchmarks/optimizers.py [--quick]

The engine's whole step is measured, without forward and backward: 2 ranks at stage 2, matrices of a GPT. States
of a whole parameter are on each rank that has a part of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Row, Watch, finish, run_ranks  # noqa: E402

WIDTH, BLOCKS, ROUNDS = 512, 4, 9
# GaLore's projection is a singular value decomposition in one step of 200: both kinds of steps are measured
PARAMS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Lion": {},
    "AdamWScheduleFree": {},
    "Adafactor": {},
    "AdamMini": {},
    "Apollo": {"rank": 64},
    "GaLore": {"rank": 64},
    "GaLore, projects": {"rank": 64, "update_proj_gap": 1},
    "Muon": {},
}


def measure(rank: int, world_size: int, precision: str, num_rounds: int) -> dict[str, Any]:
    """For each optimizer seconds of its steps, which take turns, and bytes of states for each parameter."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import xds

    def block() -> nn.Module:
        inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))
        return nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), inner, nn.LayerNorm(WIDTH)
        )

    engines, x = {}, torch.randn(2, WIDTH)
    for name, params in PARAMS.items():
        torch.manual_seed(0)
        section = {"type": name.partition(",")[0], "params": {"lr": 1e-4, **params}}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": section,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": precision == "bf16"},
        }
        engines[name] = xds.initialize(nn.Sequential(*(block() for _ in range(BLOCKS))), config)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(num_rounds + 1):
        for name, engine in engines.items():
            given = x.bfloat16() if precision == "bf16" else x
            engine.backward(engine(given).float().square().mean())
            dist.barrier()
            start = time.perf_counter()
            engine.step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    numel = sum(param.numel() for param in engines["AdamW"].module.parameters())
    states = {
        name: engine.memory_plan()["optimizer"] * world_size / numel
        for name, engine in engines.items()
    }
    return {
        "seconds": {name: taken[1:] for name, taken in seconds.items()},  # the first makes states
        "bytes": states,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 rounds; keeps nothing")
    arguments = parser.parse_args()
    rows = []
    for precision in ("fp32", "bf16"):
        with Watch() as watch:
            found = run_ranks(measure, 2, precision, 2 if arguments.quick else ROUNDS)[0]
        base = found["seconds"]["AdamW"]
        for name, taken in found["seconds"].items():
            ratios = [one / other for one, other in zip(taken, base, strict=True)]
            note = f"{found['bytes'][name]:.2f} bytes of states a parameter"
            middle = statistics.median(ratios)
            row = Row(f"{precision}, {name}", middle, min(ratios), max(ratios), note=note)
            row.others_busy = watch.others
            rows.append(row)
    return finish(__file__, rows, keeps=not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
