"""Measure a rank's memory while it builds a model that is larger than a rank's share of memory.

    python benchmarks/construction.py [--quick]

A 1.2B-parameter GPT in bf16 on 4 ranks at stage 3. Each row is the peak growth of a rank's anonymous
memory, sampled every millisecond, relative to the memory that it needs then: its shards and the largest unit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "step_time")]
from harness import RankFailed, Row, anonymous_bytes, finish, peak_of, run_ranks  # noqa: E402

MUST = 1.10
MIB = 2**20
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
WAYS = ("exact", "rounded", "weights")


def build(rank: int, world_size: int, way: str, folder: str, width: int, layers: int) -> Any:
    """Peak bytes of construction and of `initialize`, over what was there before."""
    import torch
    from model import GPT, Shape

    import xds
    from xds import zero

    warm = xds.initialize(torch.nn.Linear(8, 8), CONFIG)  # libraries, threads, connections
    warm.destroy()
    torch.manual_seed(1)
    shape = Shape(width, layers, heads=16, context=64)
    before = anonymous_bytes()

    def construct() -> torch.nn.Module:
        if way == "weights":
            with torch.device("meta"):
                return GPT(shape)
        with zero.Init(CONFIG, dtype=torch.bfloat16 if way == "rounded" else None):
            return GPT(shape)

    model, constructing = peak_of(construct)
    numel = sum(param.numel() for param in model.parameters())
    unit = sum(param.numel() for param in model.blocks[0].parameters())
    weights = Path(folder) / "model.safetensors" if way == "weights" else None
    engine, initializing = peak_of(lambda: xds.initialize(model, CONFIG, weights=weights))
    held = sum(engine.memory_plan().values())
    return {
        "numel": numel,
        "unit": unit,
        "constructing": constructing - before,
        "initializing": initializing - before,
        "held": held,
    }


def write_weights(folder: str, width: int, layers: int) -> None:
    """The same model's weights in one bf16 file."""
    import torch
    from model import GPT, Shape
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = GPT(Shape(width, layers, heads=16, context=64))
    state = {
        name: torch.full(param.shape, 0.01, dtype=torch.bfloat16)
        for name, param in model.named_parameters()
    }
    save_file(state, Path(folder) / "model.safetensors")


def rows_of(way: str, ranks: list[dict[str, Any]], world_size: int) -> list[Row]:
    """One row for each phase; the heaviest rank's."""
    share = ranks[0]["numel"] / world_size
    unit = ranks[0]["unit"]
    slice_bytes = {"exact": 4, "rounded": 2, "weights": 0}[way]
    # while it is built a module is whole in fp32; what a unit weighs is its bf16 buffer
    phases = {
        "constructing": slice_bytes * share + 2 * unit,
        "initializing": (2 + 4) * share + 2 * unit,
    }
    found = []
    for phase, allowed in phases.items():
        if phase == "constructing" and way == "weights":
            continue
        peak = max(rank[phase] for rank in ranks)
        row = Row(f"{phase}, {NAMES[way]}, {world_size} ranks", peak / allowed, must=MUST)
        row.note = (
            f"{peak / MIB:.0f} MiB at most; shards {(allowed - 2 * unit) / MIB:.0f} MiB + largest unit "
            f"{2 * unit / MIB:.0f} MiB; {ranks[0]['numel'] / 1e9:.2f}B parameters"
        )
        found.append(row)
    return found


NAMES = {
    "exact": "slices as drawn (fp32)",
    "rounded": "slices in bf16 (dtype=)",
    "weights": "from meta and a safetensors file",
}


def main() -> int:
    """Run every way; 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="0.1B parameters, 2 ranks")
    options = parser.parse_args()
    world_size, width, layers = (2, 1024, 8) if options.quick else (4, 2048, 24)
    rows: list[Row] = []
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            if way == "weights":
                write_weights(folder, width, layers)
            try:
                ranks = run_ranks(build, world_size, way, folder, width, layers)
                rows += rows_of(way, ranks, world_size)
            except RankFailed as error:
                print(error, flush=True)
                rows.append(Row(NAMES[way], must=MUST, void="FAIL (a rank failed)"))
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
