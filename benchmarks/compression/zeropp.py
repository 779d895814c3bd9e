"""Measure ZeRO++: bytes across hosts of each part and of all, and the loss of the GPT example.

    python benchmarks/compression/zeropp.py [--only PATTERN] [--quick]

- `bytes`: what a host sends to others in a step of stage 3, in bf16, on 2 hosts of 2 and of 4 ranks. Ranks are
  processes of this machine that say on which host they are. M: the bytes of all parameters in 16 bits.
  *theory*: 3 M over them, as ring gathers and a ring reduction send. *of 16 bits*: how many times less a part
  sends than 16 bits on the same way.
- `loss`: the validation loss after 300 steps over that of plain stage 3, 2 hosts of 2 ranks.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "examples" / "gpt")]
from harness import Row, finish, run_ranks  # noqa: E402
from main import batches, gpt  # noqa: E402

STEPS = 300
PARTS = {
    "stage 3": {},
    "qwZ": {"zero_quantized_weights": True},
    "qgZ": {"zero_quantized_gradients": True},
    "hpZ": {"zero_hpz_partition_size": "L"},
    "all": {
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": "L",
    },
    "all and LoCo": {
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": "L",
        "zeropp_loco_param": {},
    },
}


def config_of(part: str, length: int) -> dict[str, Any]:
    """Stage 3 with `part`; every unit is dropped between forward and backward."""
    zero = {key: length if value == "L" else value for key, value in PARTS[part].items()}
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "comms_logger": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "unit_min_numel": 1,
            "max_reuse_distance": 0,
            "param_persistence_threshold": 0,
            **zero,
        },
    }


def say_hosts(rank: int, length: int) -> None:
    """From now on this process says that it is on host `rank // length`."""
    from xds.ops.comm import exchange

    exchange._host_id = lambda: f"host {rank // length}"


def across(rank: int, world_size: int, length: int, width: int) -> Any:
    """For each part: bytes by kind to other hosts in the third step, and the elements of all buffers."""
    import torch

    import xds

    say_hosts(rank, length)
    found = {}
    for part in PARTS:
        torch.manual_seed(1)
        engine = xds.initialize(gpt(width, 4), config_of(part, length))
        source = batches(1, rank, world_size)
        before: dict[str, int] = {}
        for _ in range(3):
            before = _across(engine)
            engine.backward(engine(*next(source)))
            engine.step()
        after = _across(engine)
        numel = sum(master.params.layout.numel for master in engine._parts.updater.masters)
        engine.destroy()
        sent = {kind: size - before.get(kind, 0) for kind, size in after.items()}
        found[part] = {kind: size for kind, size in sent.items() if size and kind != "control"}
    return found, numel


def _across(engine: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for collectives in engine._parts.opened:
        for kind, size in collectives.sent_across_bytes.items():
            total[kind] = total.get(kind, 0) + size
    return total


def byte_rows(quick: bool) -> list[Row]:
    """The rows `bytes`."""
    rows = []
    for length in (2,) if quick else (2, 4):
        by_rank = run_ranks(across, 2 * length, length, 64 if quick else 256)
        numel = by_rank[0][1]
        whole = 2 * numel  # M
        pairwise = length * length / (2 * length) * whole  # an exact gather
        gathers = 0.0
        for part in PARTS:
            kinds: dict[str, int] = {}
            for found, _ in by_rank[:length]:  # one host
                for kind, size in found[part].items():
                    kinds[kind] = kinds.get(kind, 0) + size
            sent = sum(kinds.values())
            note = ", ".join(f"{kind} {size / whole:.3f} M" for kind, size in kinds.items())
            must = 3.8 if part.startswith("all") else None
            name = f"{part}, 2 hosts of {length} ranks"
            rows.append(
                Row(
                    f"bytes across, theory over {name}",
                    3 * whole / sent,
                    must=must,
                    more_is_better=True,
                    note=note,
                )
            )
            once = whole / 2  # each shard to the other host once
            gathers = gathers or kinds["all_gather"] / pairwise  # of plain stage 3
            if part == "qwZ":
                rows.append(_of_16_bits(name, gathers * once, kinds["int8 parameters"], 1.97))
            if part == "qgZ":
                rows.append(_of_16_bits(name, once, kinds["int4 sums of a host"], 3.88))
            if part == "hpZ":
                gathered = kinds["all_gather"] / pairwise
                rows.append(
                    Row(
                        f"gathers across, {name}", gathered, must=1.0, note=f"{gathers:.2f} without"
                    )
                )
    return rows


def _of_16_bits(name: str, exact: int, sent: int, must: float) -> Row:
    found = exact / sent
    return Row(f"of 16 bits, {name}", round(found, 2), must=must, more_is_better=True)


def train(rank: int, world_size: int, parts: list[str], steps: int) -> Any:
    """The final validation loss of each part."""
    import torch
    from data import load_text

    import xds

    say_hosts(rank, 2)
    _, held_out = load_text(None, 64)
    every = len(held_out) // 64
    pairs = [held_out[at * every] for at in range(64)]
    wanted = torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    found = []
    for part in parts:
        torch.manual_seed(1)
        engine = xds.initialize(gpt(64, 2), config_of(part, 2))
        source = batches(1, rank, world_size)
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
    steps = 20 if quick else STEPS
    losses = run_ranks(train, 4, list(PARTS), steps)[0]
    must = None if quick else 1.01
    return [
        Row(
            f"loss after {steps} steps, {part} over plain stage 3",
            loss / losses[0],
            must=must,
            note=f"{loss:.4f}",
        )
        for part, loss in zip(PARTS, losses, strict=True)
    ]


def main() -> int:
    """Run the chosen sections; 1 if a row misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="sections whose name matches: bytes, loss")
    parser.add_argument("--quick", action="store_true", help="small; keeps nothing")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, run in {"bytes": byte_rows, "loss": loss_rows}.items():
        if fnmatch.fnmatch(name, options.only):
            rows += run(options.quick)
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
