"""The loss of groups that meet every H steps, over that of plain data parallelism at equal tokens.

    python benchmarks/outer/loss.py [--seeds 0 1] [--groups 2 4] [--steps 300] [--ways "H 10" ...] [--quick]

The example's GPT of 1.0 M parameters trains on the sources of Python's standard library. Every run takes the
same samples in each step, G ranks with micro-batches of 4 windows of 32 bytes. The loss is that of 128 windows
that were not trained, of the outer parameters: the runs end with a meeting. Bytes are those that a rank has
sent to other groups, plain: to other ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "examples" / "gpt")]
from harness import run_ranks  # noqa: E402

CONTEXT, BATCH = 32, 4
WIDTH, LAYERS, HEADS = 144, 4, 4  # 1.0 M parameters
RATE, WARMUP = 2e-3, 40
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "H 10": {"steps": 10},
    "H 30": {"steps": 30},
    "H 100": {"steps": 100},
    "H 30, 8 bits": {"steps": 30, "bits": 8},
    "H 30, 4 bits": {"steps": 30, "bits": 4},
    "H 30, 2 bits": {"steps": 30, "bits": 2},
    "H 30, streamed": {"steps": 30, "fragments": 3, "delay": 3, "mix": 0.5, "bits": 4},
}


Rates = tuple[float, float]  # learning rate and momentum of the outer optimizer


def compare(
    rank: int, count: int, ways: list[str], seed: int, steps: int, outer: Rates
) -> dict[str, dict[str, Any]]:
    """What each way has found; rank 0 prints it."""
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        each = (WAYS[way] or {}).get("steps", 1)  # a run ends with a meeting of every fragment
        found[way] = trained(rank, count, way, seed, steps // each * each or each, outer)
        first = found[ways[0]]["loss"]
        more = {"groups": count, "seed": seed, "way": way, "outer": outer}
        found[way] |= more | {"percent": 100 * (found[way]["loss"] / first - 1)}
        if rank == 0:
            print(json.dumps(found[way]), flush=True)
    return found


def trained(rank: int, count: int, way: str, seed: int, steps: int, outer: Rates) -> dict[str, Any]:
    import torch
    from data import load_text
    from model import GPT, Shape
    from torch.nn import functional as F

    import xds

    torch.manual_seed(seed)
    model = GPT(Shape(layers=LAYERS, width=WIDTH, heads=HEADS, context=CONTEXT))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": steps, "warmup_num_steps": WARMUP},
        },
        "gradient_clipping": 1.0,
        "zero_optimization": {"unit_min_numel": 1},  # as many units as blocks
        "log_level": "warning",
    }
    if WAYS[way] is not None:
        params = {"lr": outer[0], "momentum": outer[1]}
        optimizer = {"type": "Nesterov", "params": params}
        config["outer"] = {"groups": count, "optimizer": optimizer} | (WAYS[way] or {})
    train, held = load_text(None, CONTEXT)
    engine = xds.initialize(model, config)
    order = torch.Generator().manual_seed(seed)
    begin_seconds = time.monotonic()
    for _ in range(steps):
        which = torch.randint(len(train), (count, BATCH), generator=order)[rank].tolist()
        tokens, targets = (
            torch.stack(part) for part in zip(*(train[i] for i in which), strict=True)
        )
        loss = F.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
    seconds = time.monotonic() - begin_seconds
    sent = engine.bytes_sent()
    engine.eval()
    losses = []
    with torch.no_grad():
        for which in torch.linspace(0, len(held) - 1, 128).long().split(32):
            tokens, targets = (
                torch.stack(part) for part in zip(*(held[int(i)] for i in which), strict=True)
            )
            losses.append(F.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten()).item())
    numel = sum(param.numel() for param in model.parameters())
    engine.destroy()
    total = sent["outer"] if "outer" in config else sum(sent.values())
    return {"loss": sum(losses) / len(losses), "bytes": total, "seconds": seconds, "numel": numel}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--groups", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--lr", type=float, default=0.7, help="of the outer optimizer")
    parser.add_argument("--momentum", type=float, default=0.9, help="of the outer optimizer")
    parser.add_argument("--quick", action="store_true", help="20 steps of one seed")
    options = parser.parse_args()
    steps = 20 if options.quick else options.steps
    for groups in options.groups:
        for seed in options.seeds[: 1 if options.quick else None]:
            run_ranks(
                compare,
                groups,
                options.ways,
                seed,
                steps,
                (options.lr, options.momentum),
                timeout_seconds=3600,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
