"""The validation loss of the example's GPT after compressed training, over that of the dense model.

    python benchmarks/compressed_gpt.py [--seeds 0 1] [--steps 700] [--ways w8a8 rows] [--quick]

The dense model trains on the sources of Python's standard library. Each way begins with it, and trains half as
many steps with it as teacher. `dense, longer` trains these steps without compression: what they gain alone.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples" / "gpt")]
from harness import Row, Watch, finish, run_ranks  # noqa: E402

CONTEXT, BATCH, HEADS = 128, 16, 5
MOST = 1.01  # of the dense model's loss
ALWAYS = {"enabled": True, "schedule_offset": 0}
LAYERS = {"modules": ["blocks"]}


def technique(name: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A technique that begins with the first step. more: of its layers, or `shared` of all."""
    shared = ALWAYS | more.pop("shared", {})
    return {
        name: {
            "shared_parameters": shared,
            "different_groups": {"all": {"params": params} | LAYERS | more},
        }
    }


HALF = {"dense_ratio": 0.5}
WAYS: dict[str, dict[str, Any]] = {
    "w8a8": technique(
        "weight_quantization",
        {"start_bits": 8, "target_bits": 8},
        shared={"quantize_weight_in_forward": True, "quantize_groups": 2},
    )
    | technique("activation_quantization", {"bits": 8}),
    "sparse": technique("sparse_pruning", HALF, shared={"method": "l1"}),
    "rows": technique(
        "row_pruning",
        HALF,
        shared={"method": "l1"},
        modules=[r"blocks.\d+.up"],
        related_modules=[[r"blocks.\d+.down"]],
    ),
    "heads": technique(
        "head_pruning", HALF, shared={"method": "l1", "num_heads": HEADS}, modules=["attention.out"]
    ),
    "dense, longer": {},
}


def trained(
    model: Any, section: dict[str, Any], steps: int, seed: int, teacher: Any = None
) -> float:
    """The validation loss after `steps`."""
    import torch
    from data import load_text
    from torch.nn import functional as F

    import xds

    training, validation = load_text(None, CONTEXT)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": steps,
                "warmup_num_steps": steps // 14,
                "cos_min_ratio": 0.1,
            },
        },
        "log_level": "warning",
    }
    if section:
        config["compression_training"] = section
    engine = xds.initialize(model, config)
    draw = torch.Generator().manual_seed(seed)

    def batch(windows: Any, which: Any) -> tuple[Any, Any]:
        pairs = [windows[int(at)] for at in which]
        return torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])

    for _ in range(steps):
        tokens, targets = batch(training, torch.randint(len(training), (BATCH,), generator=draw))
        logits = engine(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if teacher is not None:
            with torch.no_grad():
                told = teacher(tokens)
            loss = loss + xds.compression.distillation_loss(logits, told)
        engine.backward(loss)
        engine.step()
    engine.eval()
    with torch.no_grad():
        spread = torch.linspace(0, len(validation) - 1, 512).long()
        losses = [engine(*batch(validation, which)).item() for which in spread.split(BATCH)]
    engine.destroy()
    return sum(losses) / len(losses)


def compare(rank: int, _: int, seed: int, steps: int, ways: list[str]) -> dict[str, float]:
    """Losses by way; "dense" is the first one."""
    import torch
    from model import GPT, Shape

    torch.manual_seed(seed)
    dense = GPT(Shape(heads=HEADS, context=CONTEXT))
    found = {"dense": trained(dense, {}, steps, seed)}
    print(seed, found, flush=True)
    dense.requires_grad_(False)
    for way in ways:
        model = copy.deepcopy(dense).requires_grad_()
        found[way] = trained(model, WAYS[way], steps // 2, seed + 1000, teacher=dense)
        print(seed, way, found[way], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=700, help="of the dense model")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--quick", action="store_true", help="14 steps; keeps nothing")
    options = parser.parse_args()
    steps = 14 if options.quick else options.steps
    rows = []
    with Watch() as watch:
        for seed in options.seeds[: 1 if options.quick else None]:
            found = run_ranks(compare, 1, seed, steps, options.ways, timeout_seconds=3 * 3600)[0]
            for way in options.ways:
                judged = None if options.quick or not WAYS[way] else MOST
                row = Row(f"{way}, seed {seed}", found[way] / found["dense"], must=judged)
                row.note = f"loss {found[way]:.4f}, dense {found['dense']:.4f}"
                rows.append(row)
    for row in rows:
        row.others_busy = watch.others
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
