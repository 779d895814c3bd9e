"""Measure one-bit messages: bytes, memory, and the loss of the GPT example.

    python benchmarks/compression/main.py [--only PATTERN] [--quick]    # links.py: steps over slow links

- `bytes`: what a rank sends in a compressed step, over 2 x 0.1289 bytes an element and (N - 1) / N.
- `memory`: model states of 1-bit Adam less those of AdamW, bytes a parameter, on the rank that has the most.
- `loss`: the final validation loss of 1-bit Adam at each stage and seed, against the spread of AdamW's seeds.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "examples" / "gpt")]
from harness import Row, finish, run_ranks  # noqa: E402

AN_ELEMENT = 1 / 8 + 4 / 1024  # bytes of a message
SEEDS, STEPS, FREEZE = 5, 700, 126  # the warm-up is 18 % of the run
STATES = ("param", "grad", "master", "optimizer")


def config_of(stage: int, optimizer: str, freeze: int, precision: str = "fp32") -> dict[str, Any]:
    """The JSON of an engine."""
    params: dict[str, Any] = {"lr": 1e-3}
    if optimizer == "OneBitAdam":
        params |= {"freeze_step": freeze, "weight_decay": 0.01}
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": optimizer, "params": params},
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage},
    }


def example_config(stage: int, steps: int, optimizer: str, **params: Any) -> dict[str, Any]:
    """The JSON of the GPT example at `stage`, in bf16, for so many steps. params: more of the optimizer."""
    example = HERE.parents[1] / "examples" / "gpt" / f"zero{stage}.json"
    config: dict[str, Any] = json.loads(example.read_text())
    config["optimizer"]["type"] = optimizer
    config["optimizer"]["params"] |= params
    config["scheduler"]["params"] |= {
        "total_num_steps": steps,
        "warmup_num_steps": max(1, steps // 14),
    }
    return config | {"bf16": {"enabled": True}}


def gpt(width: int, layers: int) -> Any:
    """The GPT of examples/gpt."""
    from model import GPT, Shape

    return GPT(Shape(layers, width, heads=4, context=64))


def batches(seed: int, rank: int, world_size: int) -> Any:
    """Micro-batches without end, others on each rank."""
    import torch
    from data import load_text

    windows, _ = load_text(None, 64)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randint(len(windows), (world_size, 8), generator=generator)[rank]
        pairs = [windows[int(at)] for at in order]
        yield torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


# -- bytes and memory ------------------------------------------------------------------------------------


def held_and_sent(rank: int, world_size: int, cases: list[tuple[int, str]], width: int) -> Any:
    """For each case: bytes that exact and one-bit Adam hold, and those that the latter sends in a step."""
    import torch

    import xds

    found = []
    for stage, precision in cases:
        held = {}
        for optimizer in ("AdamW", "OneBitAdam"):
            torch.manual_seed(1)
            engine = xds.initialize(gpt(width, 4), config_of(stage, optimizer, 1, precision))
            source = batches(1, rank, world_size)
            for _ in range(3):
                before = engine.bytes_sent()
                engine.backward(engine(*next(source)))
                engine.step()
            plan = engine.memory_plan()
            held[optimizer] = sum(plan[kind] for kind in STATES)
            after = engine.bytes_sent()
            numels = [master.params.layout.numel for master in engine._parts.updater.masters]
            engine.destroy()
        sent = {kind: after[kind] - before.get(kind, 0) for kind in after}
        one_bit = sum(size for kind, size in sent.items() if kind.startswith("one-bit"))
        found.append((held, one_bit, numels))
    return found


def size_rows(quick: bool) -> list[Row]:
    """The rows `bytes` and `memory`."""
    rows = []
    for world_size in (2,) if quick else (2, 4, 8):
        cases = [(stage, precision) for precision in ("fp32", "bf16") for stage in (0, 1, 2)]
        by_rank = run_ranks(held_and_sent, world_size, cases, 64 if quick else 256)
        for at, (stage, precision) in enumerate(cases):
            held, sent, numels = by_rank[0][at]
            # a message ends with a whole magnitude, and a shard may end within 1024 elements
            exact = sum(
                2 * (world_size - 1) * (n // world_size // 8 + 4 * -(-(n // world_size) // 1024))
                for n in numels
            )
            formula = 2 * AN_ELEMENT * (world_size - 1) / world_size * sum(numels)
            name = f"stage {stage}, {precision}, {world_size} ranks"
            note = f"{sent} bytes; of messages {exact}, of the formula {formula:.0f}"
            rows.append(Row(f"bytes, {name}", sent / exact, must=1.0, note=note))
            times = (2 if precision == "bf16" else 4) * 2 * (world_size - 1) / world_size
            fewer = times * sum(numels) / sent
            must = 15.5 if precision == "bf16" else 31.0
            rows.append(Row(f"bytes fewer, {name}", fewer, must=must, more_is_better=True))
            more = [ranks[at][0]["OneBitAdam"] - ranks[at][0]["AdamW"] for ranks in by_rank]
            server = 4 / world_size
            limit = 4 + server if stage == 0 or precision == "fp32" else 4.0
            rows.append(Row(f"memory, {name}", max(more) / sum(numels), must=limit, unit=" B"))
    return rows


# -- the loss --------------------------------------------------------------------------------------------


def train(rank: int, world_size: int, cases: list[tuple[str, int, int]], steps: int) -> Any:
    """The final validation loss of each case (optimizer, stage, seed), in bf16."""
    import torch
    from data import load_text

    import xds

    _, held_out = load_text(None, 64)
    every = len(held_out) // 64
    pairs = [held_out[at * every] for at in range(64)]
    wanted = torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    found = []
    for optimizer, stage, seed in cases:
        torch.manual_seed(seed)
        more = {"freeze_step": steps * FREEZE // STEPS} if optimizer == "OneBitAdam" else {}
        engine = xds.initialize(gpt(64, 2), example_config(stage, steps, optimizer, **more))
        source = batches(seed, rank, world_size)
        for _ in range(steps):
            engine.backward(engine(*next(source)))
            engine.step()
        engine.eval()
        with torch.no_grad():
            found.append(float(engine(*wanted)))
        engine.destroy()
    return found


def loss_rows(quick: bool) -> list[Row]:
    """The rows `loss`."""
    seeds, steps = (range(2), 20) if quick else (range(SEEDS), STEPS)
    kinds = [("AdamW", 1), *(("OneBitAdam", stage) for stage in (0, 1, 2))]
    cases = [(optimizer, stage, seed) for optimizer, stage in kinds for seed in seeds]
    losses = run_ranks(train, 2, cases, steps, timeout_seconds=7200)[0]
    by_kind = {
        kind: losses[at * len(seeds) : (at + 1) * len(seeds)] for at, kind in enumerate(kinds)
    }
    exact = by_kind["AdamW", 1]
    rows = []
    for (optimizer, stage), found in by_kind.items():
        name = f"loss, {optimizer}, stage {stage}, {len(seeds)} seeds, {steps} steps"
        spread = ", ".join(f"{loss:.3f}" for loss in found)
        is_exact = optimizer == "AdamW"
        rows.append(
            Row(
                name,
                statistics.mean(found),
                min(found),
                max(found),
                must=None if is_exact or quick else max(exact),
                unit="",
                note=spread,
                samples={"loss": found},
            )
        )
    return rows


PARTS = {
    "bytes": size_rows,
    "loss": loss_rows,
}


def main() -> int:
    """Run the chosen parts; 1 if a row misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="parts whose name matches: bytes, loss")
    parser.add_argument("--quick", action="store_true", help="small; keeps nothing")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, run in PARTS.items():
        if fnmatch.fnmatch(name, options.only):
            rows += run(options.quick)
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
