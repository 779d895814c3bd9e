"""Step time of a mixture whose experts are on different ranks, over the same mixture without.

    python benchmarks/experts/step.py [--only PATTERN] [--rounds N] [--quick] [--patience MINUTES]

A small Qwen3-MoE of 32 experts, 2 ranks. All contestants train the same batches in the same processes and take
turns; their losses must agree.
"""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from harness import (  # noqa: E402
    Plan,
    Row,
    Watch,
    alternate,
    comparison_parser,
    finish,
    mean_over_ranks,
    ratio_row,
    run_ranks,
    slowest,
    wait_until_quiet,
)

EXPERTS, CHOICES, RANKS = 32, 4, 2
TOLERANCE = 1e-4
# name -> stage, ranks that share experts (0: the section is not in the config)
CONTESTANTS = {
    "experts": (2, RANKS),
    "experts at stage 3": (3, RANKS),
    "stage 2": (2, 0),
    "stage 3": (3, 0),
}
CLAIMS = [("experts", "stage 2", 0.85), ("experts at stage 3", "stage 3", 0.6)]
SIZES = {
    "small": (128, 4, 64),
    "medium": (256, 4, 128),
    "large": (512, 2, 128),
}  # width, layers, tokens of a rank


def build(name: str, size: str, batch: Any) -> Any:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import xds

    width, layers, _ = SIZES[size]
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=2 * width,
            moe_intermediate_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=width // 4,
            num_experts=EXPERTS,
            num_experts_per_tok=CHOICES,
        )
    )
    stage, size_of_group = CONTESTANTS[name]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "log_level": "error",
    }
    if size_of_group:
        config["expert_parallel"] = {"enabled": True, "autoep_size": size_of_group}
    engine = xds.initialize(model, config)

    def step(number: int) -> torch.Tensor:
        ids = batch(number)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def contest(rank: int, world_size: int, size: str, plan: Plan) -> Any:
    import torch

    tokens = SIZES[size][2]

    def batch(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        return torch.randint(0, 256, (1, tokens), generator=generator)

    steps = {name: build(name, size, batch) for name in CONTESTANTS}
    return alternate(steps, plan)


def compare(size: str, plan: Plan) -> list[Row]:
    with Watch() as watch:
        results = run_ranks(contest, RANKS, size, plan)
    seconds = slowest([one for one, _ in results])
    losses = mean_over_ranks([one for _, one in results])
    rows = []
    for ours, theirs, must in CLAIMS:
        row = ratio_row(f"{size}: {ours} over {theirs}", seconds[ours], seconds[theirs], must=must)
        gap = abs(losses[ours][-1] - losses[theirs][-1]) / losses[theirs][-1]
        row.void = "" if gap <= TOLERANCE else f"VOID: losses differ by {gap:.1e}"
        milliseconds = min(seconds[theirs]) * 1e3
        row.note, row.others_busy, row.samples = (
            f"{theirs} {milliseconds:.0f} ms",
            watch.others,
            seconds,
        )
        rows.append(row)
    return rows


def main() -> int:
    parser = comparison_parser(__doc__ or "", example="small*", quick="two rounds")
    args = parser.parse_args()
    plan = Plan(rounds=2 if args.quick else args.rounds or 9)
    rows: list[Row] = []
    for size in SIZES:
        if fnmatch.fnmatch(size, args.only):
            wait_until_quiet(args.patience)
            rows += compare(size, plan)
    return finish(__file__, rows, keeps=not args.quick)


if __name__ == "__main__":
    sys.exit(main())
