"""Measure MiCS: bytes across hosts against plain stage 3, with one and with four micro-batches.

    python benchmarks/compression/mics.py [--quick]

What all ranks send to other hosts in a step of stage 3, in bf16, on 4 hosts of 2 ranks. Ranks are processes of
this machine that say on which host they are. *theory*: the formulas of docs/design/mics.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from harness import Row, finish, run_ranks  # noqa: E402
from main import batches, gpt  # noqa: E402

RANKS, LENGTH = 8, 2
SIZES = {  # mics_shard_size, gathers in two levels
    "plain": (0, False),
    "S = 2, a host": (2, False),
    "S = 4, two hosts": (4, False),
    "S = 4, two levels": (4, True),
    "S = 8, two levels": (8, True),
}


def config_of(size: int, levels: bool, count: int) -> dict[str, Any]:
    """Stage 3; every unit is dropped between forward and backward."""
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "comms_logger": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "unit_min_numel": 1,
            "max_reuse_distance": 0,
            "param_persistence_threshold": 0,
            "mics_shard_size": size,
            "mics_hierarchical_params_gather": levels,
        },
    }


def across(rank: int, world_size: int, count: int, width: int) -> Any:
    """For each case: the bytes by kind to other hosts in the second step, all sent, and the loss."""
    import torch

    import xds
    from xds.ops.comm import hosts

    hosts._host_id = lambda: f"host {rank // LENGTH}"
    found = {}
    for name, (size, levels) in SIZES.items():
        torch.manual_seed(1)
        engine = xds.initialize(gpt(width, 2), config_of(size, levels, count))
        source = batches(1, rank, world_size)
        before: dict[str, int] = {}
        for _ in range(2):
            before = _across(engine)
            for _ in range(count):
                loss = engine(*next(source))
                engine.backward(loss)
                engine.step()
        after = _across(engine)
        engine.destroy()
        kinds = {kind: size - before.get(kind, 0) for kind, size in after.items()}
        found[name] = kinds, float(loss.detach())
    return found


def _across(engine: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for collectives in engine._parts.opened:
        for kind, size in collectives.sent_across_bytes.items():
            total[kind] = total.get(kind, 0) + size
    return total


def rows(quick: bool) -> list[Row]:
    """One row for each case."""
    found = []
    for count in (1, 4):
        by_rank = run_ranks(across, RANKS, count, 64 if quick else 128)
        plain = sum(sum(kinds["plain"][0].values()) for kinds in by_rank)
        for name in SIZES:
            kinds: dict[str, int] = {}
            for of_rank in by_rank:
                for kind, size in of_rank[name][0].items():
                    kinds[kind] = kinds.get(kind, 0) + size
            own = {kind: size for kind, size in kinds.items() if size and kind != "control"}
            note = ", ".join(f"{kind} {size / 1e6:.2f} MB" for kind, size in own.items())
            note += f"; loss {by_rank[0][name][1]:.5f}"
            ratio = sum(kinds.values()) / plain
            found.append(
                Row(f"bytes across, {count} micro-batches, {name}, over plain", ratio, note=note)
            )
    return found


def main() -> int:
    """Measure, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small; keeps nothing")
    options = parser.parse_args()
    return finish(HERE, rows(options.quick), keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
