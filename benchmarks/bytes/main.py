"""Compare the bytes that a training step sends: the engine's count, the theory and the kernel's count.

    python benchmarks/bytes/main.py [--only PATTERN] [--quick]

Stages 0-3 x 2, 4, 8 ranks x 1 and 4 micro-batches. Two requirements: the engine's count equals
the theory for the padded units exactly (and padding is at most 1 % of the parameters), and the kernel's count
on the loopback device is within 5 % of the engine's count.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "step_time")]
from harness import RankFailed, Row, finish, run_ranks  # noqa: E402
from theory import UnitSize, bytes_per_step  # noqa: E402

WIDTH, LAYERS, CONTEXT = 200, 4, 64  # a width that does not divide evenly, so that there is padding
WINDOWS, STEPS = 4, 3  # the smallest of the windows counts: other traffic only adds bytes
SMALL = ("control", "broadcast")  # kinds that carry a few numbers: norms, flags
MAX_PADDING, MAX_WIRE = 1.01, 1.05


def loopback_bytes() -> int:
    """Bytes sent on the loopback device since boot, by all processes."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise OSError("/proc/net/dev has no loopback device")


def unit_sizes(model: Any, world_size: int) -> tuple[list[UnitSize], list[UnitSize]]:
    """The units bare and with their padding, from xds's own planner and without an engine.

    Gathered from forward to backward: the root, and the last block, which backward needs first.
    """
    from xds.zero.core.discover import find_units
    from xds.zero.core.layout import Entry, plan_flat

    blocks, root = find_units(model, (), 0)
    bare, padded = [], []
    for unit in (*blocks, root):
        kept = unit is root or unit is blocks[-1]
        entries = [Entry(name, tuple(param.shape), 0) for name, param in unit.params]
        bare.append(UnitSize(unit.numel, kept))
        padded.append(UnitSize(plan_flat(entries, world_size).numel, kept))
    return bare, padded


def count(rank: int, world_size: int, cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """One rank's counts for each (stage, micro-batches)."""
    import torch
    import torch.distributed as dist
    from model import GPT, Shape

    import xds

    found = []
    for stage, num_micro_batches in cases:
        torch.manual_seed(1)
        model = GPT(Shape(WIDTH, LAYERS, heads=4, context=CONTEXT))
        bare, padded = unit_sizes(model, world_size)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": num_micro_batches,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": stage,
                "unit_min_numel": 0,
                "stage3_max_reuse_distance": 0,
            },
        }
        engine = xds.initialize(model, config)
        tokens = torch.randint(256, (1, CONTEXT + 1))

        def steps(number: int, engine: Any = engine, tokens: Any = tokens) -> None:
            for _ in range(number * engine.gradient_accumulation_steps()):
                engine.backward(engine(tokens))
                engine.step()

        steps(1)
        wires = []
        before = dict(engine.bytes_sent())
        for _ in range(WINDOWS):
            dist.barrier()
            start = loopback_bytes()
            dist.barrier()
            steps(STEPS)
            dist.barrier()
            wires.append((loopback_bytes() - start) / STEPS)
        sent = {
            kind: (total - before.get(kind, 0)) / (WINDOWS * STEPS)
            for kind, total in engine.bytes_sent().items()
        }
        engine.destroy()
        found.append({"sent": sent, "wire": min(wires), "bare": bare, "padded": padded})
    return found


def build_rows(
    case: tuple[int, int], world_size: int, ranks: list[dict[str, Any]], name: str
) -> list[Row]:
    """Two rows: the engine's count against theory, and the kernel's against the engine's."""
    stage, num_micro_batches = case
    ideal, planned = (
        bytes_per_step(ranks[0][sizes], stage, world_size, num_micro_batches)
        for sizes in ("bare", "padded")
    )
    payload = [
        sum(sent for kind, sent in rank["sent"].items() if kind not in SMALL) for rank in ranks
    ]
    small = sum(ranks[0]["sent"].get(kind, 0) for kind in SMALL)
    row = Row(f"{name}: counted / theory", payload[0] / ideal, must=MAX_PADDING)
    row.note = (
        f"{payload[0]:.0f} B a rank and step, padding {planned - ideal:.0f} B, "
        f"and {small:.0f} B of norms"
    )
    row.samples = {"counted": payload, "planned": [planned], "theory": [ideal]}
    wrong = [sent for sent in payload if not math.isclose(sent, planned, rel_tol=1e-12)]
    if wrong:
        row.void = f"FAIL (counted {wrong[0]:.0f} B, planned {planned:.0f} B: {ranks[0]['sent']})"
    counted = sum(sum(rank["sent"].values()) for rank in ranks)
    wire = Row(f"{name}: kernel / counted", ranks[0]["wire"] / counted, must=MAX_WIRE)
    wire.note = f"{ranks[0]['wire'] / 1e6:.3f} MB of all ranks a step"
    if ranks[0]["wire"] < counted / MAX_WIRE:
        wire.void = "FAIL (the kernel saw less than was counted)"
    return [row, wire]


def main() -> int:
    """Run the selected cases; 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="cases whose name matches, such as 'stage 3*'")
    parser.add_argument("--quick", action="store_true", help="two ranks only; keeps nothing")
    options = parser.parse_args()
    rows: list[Row] = []
    for world_size in (2,) if options.quick else (2, 4, 8):
        cases = {
            f"stage {stage}, {world_size} ranks, {micro} micro-batch{'es' * (micro > 1)}": (
                stage,
                micro,
            )
            for stage in range(4)
            for micro in (1, 4)
        }
        cases = {n: c for n, c in cases.items() if fnmatch.fnmatch(n, options.only)}
        if not cases:
            continue
        try:
            ranks = run_ranks(count, world_size, list(cases.values()))
        except RankFailed as error:
            print(error)
            reason = str(error).strip().splitlines()[-1]
            rows += [Row(name, must=MAX_PADDING, void=f"FAIL ({reason})") for name in cases]
            continue
        for i, (name, case) in enumerate(cases.items()):
            rows += build_rows(case, world_size, [rank[i] for rank in ranks], name)
    return finish(HERE, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
