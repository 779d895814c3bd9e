"""Compare the model states of a rank with the formula, and with the process's memory.

    python benchmarks/memory.py [--only PATTERN] [--quick]

Two parts. `states`: all distinct storages that exist after a training step (found with the garbage
collector, so they include storages that the engine does not report), less the buckets that the engine
reports, are at most 1.01 of the formula. `resident`: at 200M parameters the growth of the processes'
proportional set sizes is within 8 % of the engines' own reports.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import gc
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "step_time")]
from harness import RankFailed, Row, finish, run_ranks  # noqa: E402

MAX_STATES, MAX_RESIDENT = 1.01, 1.08
MIB = 2**20
SHARED = " shared"  # of a precision: the ranks have one copy of the parameters
Case = tuple[int, str]  # stage, precision


def formula(stage: int, world_size: int, numel: int, bf16: bool, grad_bytes: int = 4) -> float:
    """Model-state bytes per rank (ZeRO paper, section 3, with Adam).

    fp32: 4 parameter + 4 gradient + 8 moments. bf16 with fp32 master: 2 parameter + 4 gradient
    (xds sums gradients of 16-bit parameters in fp32 by default) + 12 master and moments.
    With `grad_bytes` 2 it is the paper's own line, which sums in 16 bits.
    """
    param, optimizer = (2, 12) if bf16 else (4, 8)
    over = [world_size if stage >= level else 1 for level in (3, 2, 1)]
    kinds = (param, grad_bytes, optimizer)
    return numel * sum(size / shards for size, shards in zip(kinds, over, strict=True))


def storages() -> dict[int, int]:
    """Bytes of every distinct CPU storage that a live tensor refers to, by address."""
    import torch

    gc.collect()
    found = {}
    for thing in gc.get_objects():
        is_tensor = isinstance(thing, torch.Tensor) and thing.layout is torch.strided
        if is_tensor and not thing.is_meta:  # the outlines of other stages' modules have no memory
            storage = thing.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def resident_bytes() -> int:
    """This process's proportional set size, after freed memory was returned to the kernel."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/smaps_rollup has no Pss line")


def make_engine(width: int, layers: int, stage: int, precision: str) -> tuple[Any, int]:
    """An engine on a GPT of about 12 * layers * width^2 parameters."""
    import torch
    from model import GPT, Shape

    import xds

    torch.manual_seed(1)
    model = GPT(Shape(width, layers, heads=8, context=16))
    numel = sum(parameter.numel() for parameter in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": precision.startswith("bf16")},
        "zero_optimization": {
            "stage": stage,
            "shared_parameters": precision.endswith(SHARED),
        },
    }
    return xds.initialize(model, config), numel


def train(engine: Any, steps: int) -> None:
    """Run a few steps on a few tokens: the states are measured, not the activations."""
    import torch

    for _ in range(steps):
        engine.backward(engine(torch.randint(256, (1, 17))))
        engine.step()


def weigh(_: int, __: int, cases: list[Case], width: int, layers: int) -> list[dict[str, Any]]:
    """One rank's states and resident memory for each case."""
    engine, _numel = make_engine(64, 2, 0, "fp32")
    train(engine, 1)  # kernels, threads and libraries are loaded before the first reading
    engine.destroy()
    del engine
    found = []
    for stage, precision in cases:
        known, resident = storages(), resident_bytes()
        engine, numel = make_engine(width, layers, stage, precision)
        train(engine, 2)
        now = storages()
        fresh = {at: size for at, size in now.items() if known.get(at) != size}
        found.append(
            {
                "plan": dict(engine.memory_plan()),
                "storages": sum(fresh.values()),
                "resident": resident_bytes() - resident,
                "numel": numel,
            }
        )
        engine.destroy()
        del engine
    return found


def states_row(name: str, case: Case, world_size: int, ranks: list[dict[str, Any]]) -> Row:
    """The largest storages of a rank, less the named buckets, relative to the formula."""
    stage, precision = case
    worst = max(ranks, key=lambda rank: rank["storages"] - rank["plan"].get("buckets", 0))
    plan, numel = worst["plan"], worst["numel"]
    want = formula(stage, world_size, numel, precision == "bf16")
    buckets = plan.get("buckets", 0)
    held = worst["storages"] - buckets
    row = Row(name, held / want, must=MAX_STATES)
    row.note = (
        f"formula {want / numel:.2f} B a parameter; held {held / numel:.2f}, of it gradients "
        f"{plan.get('grad', 0) / numel:.2f}; buckets {buckets / MIB:.1f} MiB"
    )
    if precision == "bf16":
        strict = held / formula(stage, world_size, numel, True, grad_bytes=2)
        row.note += f"; {strict:.3f}x of the formula with 2-byte gradients"
    named = sum(size for kind, size in plan.items() if kind != "buckets")
    if named > want * MAX_STATES:
        row.void = f"FAIL (the plan names {named / want:.3f} of the formula: {plan})"
    return row


def resident_row(name: str, ranks: list[dict[str, Any]]) -> Row:
    """The growth of all processes relative to all buckets of their plans.

    Of all: ranks read one another's memory in place, and a page counts in parts for those that have read it.
    """
    grown = sum(rank["resident"] for rank in ranks)
    ratio = grown / sum(sum(rank["plan"].values()) for rank in ranks)
    row = Row(name, ratio, must=MAX_RESIDENT)
    row.note = f"{grown / len(ranks) / MIB:.0f} MiB a rank, {ranks[0]['numel'] / 1e6:.0f}M"
    if ratio < 2 - MAX_RESIDENT:
        row.void = "FAIL (the processes hold less than the plan names)"
    return row


def run_states(world_size: int, only: str) -> list[Row]:
    """Stages 0-3 in fp32 and bf16 on a 20M model."""
    cases: dict[str, Case] = {
        f"states, stage {stage}, {world_size} rank{'s' * (world_size > 1)}, {precision}": (
            stage,
            precision,
        )
        for precision in ("fp32", "bf16")
        for stage in range(4)
    }
    cases = {name: case for name, case in cases.items() if fnmatch.fnmatch(name, only)}
    ranks = _weigh_all(cases, world_size, 512, 6)
    if ranks is None:
        return [Row(name, must=MAX_STATES, void="FAIL (a rank failed)") for name in cases]
    return [
        states_row(name, case, world_size, [rank[i] for rank in ranks])
        for i, (name, case) in enumerate(cases.items())
    ]


def run_resident(only: str) -> list[Row]:
    """Stages 0-3 in fp32 on a 200M model, each in new processes; 1 and 2 also with one copy of parameters."""
    rows = []
    cases = [(stage, "fp32") for stage in range(4)] + [(1, "fp32" + SHARED), (2, "bf16" + SHARED)]
    for stage, precision in cases:
        name = f"resident, stage {stage}, 2 ranks, {precision}"
        if fnmatch.fnmatch(name, only):
            ranks = _weigh_all({name: (stage, precision)}, 2, 1024, 16)
            failed = Row(name, must=MAX_RESIDENT, void="FAIL (a rank failed)")
            rows.append(resident_row(name, [rank[0] for rank in ranks]) if ranks else failed)
    return rows


def _weigh_all(
    cases: dict[str, Case], world_size: int, width: int, layers: int
) -> list[Any] | None:
    if not cases:
        return []
    try:
        return run_ranks(weigh, world_size, list(cases.values()), width, layers)
    except RankFailed as error:
        print(error, flush=True)
        return None


def main() -> int:
    """Run the selected cases; 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="rows whose name matches, such as 'resident*'")
    parser.add_argument("--quick", action="store_true", help="two ranks, states; keeps nothing")
    options = parser.parse_args()
    rows: list[Row] = []
    for world_size in (2,) if options.quick else (1, 2, 4, 8):
        rows += run_states(world_size, options.only)
    if not options.quick:
        rows += run_resident(options.only)
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
