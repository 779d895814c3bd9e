"""Step time of a mixture whose experts are on different ranks, over the same mixture without.

    python benchmarks/experts/step.py [--only PATTERN] [--rounds N] [--quick] [--patience MINUTES]

A small Qwen3-MoE of 32 experts on 2 ranks, and layers of DeepSpeed's class MoE, here and there. All contestants
train the same batches in the same processes and take turns. Their first losses must agree. Rows with DeepSpeed
need its package.
"""

from __future__ import annotations

import fnmatch
import sys
from importlib.util import find_spec
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
# name -> stage, ranks that share experts (0: the section is not in the config), chunks
CONTESTANTS = {
    "experts": (2, RANKS, 1),
    "experts at stage 3": (3, RANKS, 1),
    "experts in 2 chunks": (2, RANKS, 2),
    "experts in 4 chunks": (2, RANKS, 4),
    "stage 2": (2, 0, 1),
    "stage 3": (3, 0, 1),
}
AUTOEP = "DeepSpeed's AutoEP"
LAYERS = {"layers": "xds", "DeepSpeed's layers": "deepspeed"}  # of the class MoE: whose
CLAIMS = [
    ("experts", "stage 2", 0.85),
    ("experts at stage 3", "stage 3", 0.6),
    ("experts in 2 chunks", "experts", None),
    ("experts in 4 chunks", "experts", None),
    ("experts", AUTOEP, 0.85),
    ("layers", "DeepSpeed's layers", 0.85),
]
SIZES = {
    "small": (128, 4, 64),
    "medium": (256, 4, 128),
    "large": (512, 2, 128),
}  # width, layers, tokens of a rank


def mixture(size: str) -> Any:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    width, layers, _ = SIZES[size]
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
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


def layers_of(size: str, whose: str) -> Any:
    """A model of layers of DeepSpeed's class MoE, in xds or in DeepSpeed, with the same values."""
    import torch
    from torch import Tensor, nn

    if whose == "xds":
        from xds.engine.deepspeed.library.moe import MoE
    else:
        from deepspeed.moe.layer import MoE
    width, layers, _ = SIZES[size]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(256, width)
            self.head = nn.Linear(width, 256)
            experts = [
                nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                for _ in range(layers)
            ]
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in experts)
            self.layers = nn.ModuleList(
                MoE(width, expert, EXPERTS, ep_size=RANKS, k=CHOICES) for expert in experts
            )
            for name, param in self.named_parameters():
                if name.endswith("gate.wg.weight"):
                    nn.init.normal_(param, std=0.02, generator=torch.Generator().manual_seed(1))

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(input_ids)
            loss = x.new_zeros(())
            for norm, layer in zip(self.norms, self.layers, strict=True):
                output, balance, _ = layer(norm(x))
                x, loss = x + output, loss + 0.01 * balance
            return loss + nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    return Model()


def _let_autoep_run() -> None:
    """transformers 5.23 has a registry whose `get` lacks the default that DeepSpeed 0.19.8 gives it."""
    from transformers.utils import output_capturing

    registry = output_capturing._CanRecordRegistry
    own = dict.get
    registry.get = lambda self, model, default=None: own(self, str(type(model))) or default or {}


def build(name: str, size: str, batch: Any) -> Any:
    import torch

    params: dict[str, Any] = {"lr": 3e-4}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": 2},
    }
    model = layers_of(size, LAYERS[name]) if name in LAYERS else mixture(size)
    if name == AUTOEP or LAYERS.get(name) == "deepspeed":
        import deepspeed
        from deepspeed.moe.utils import (
            split_params_into_different_moe_groups_for_optimizer as split,
        )

        # it would compile what inference alone uses
        deepspeed.ops.__compatible_ops__.update(
            dict.fromkeys(deepspeed.ops.__compatible_ops__, False)
        )
        # torch's fused AdamW: DeepSpeed's own has to be compiled, and is slower
        params |= {"torch_adam": True, "fused": True}
        groups: Any = {"params": list(model.parameters()), "name": "parameters"}
        if name == AUTOEP:
            _let_autoep_run()
            config["expert_parallel"] = {
                "enabled": True,
                "autoep_size": RANKS,
                "preset_model": "qwen3_moe",
            }
            groups = groups["params"]
        engine = deepspeed.initialize(
            model=model,
            model_parameters=groups if name == AUTOEP else split(groups),
            config=config | {"steps_per_print": 10**9},
        )[0]
    else:
        import xds

        stage, size_of_group, chunks = CONTESTANTS.get(name, (2, 0, 1))
        config |= {"zero_optimization": {"stage": stage}, "log_level": "error"}
        if size_of_group:
            config["expert_parallel"] = {
                "enabled": True,
                "autoep_size": size_of_group,
                "chunks": chunks,
            }
        engine = xds.initialize(model, config)

    def step(number: int) -> torch.Tensor:
        ids = batch(number)
        output = engine(input_ids=ids, labels=ids)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def contest(rank: int, world_size: int, size: str, names: list[str], plan: Plan) -> Any:
    import torch

    tokens = SIZES[size][2]

    def batch(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        return torch.randint(0, 256, (1, tokens), generator=generator)

    steps = {name: build(name, size, batch) for name in names}
    return alternate(steps, plan)


def compare(size: str, plan: Plan) -> list[Row]:
    names = list(CONTESTANTS)
    if find_spec("deepspeed") is not None:
        names += [AUTOEP, *LAYERS]
    with Watch() as watch:
        results = run_ranks(contest, RANKS, size, names, plan)
    seconds = slowest([one for one, _ in results])
    losses = mean_over_ranks([one for _, one in results])
    rows = []
    for ours, theirs, must in CLAIMS:
        if theirs not in names:
            rows.append(Row(f"{size}: {ours} over {theirs}", must=must, void="SKIP: no deepspeed"))
            continue
        row = ratio_row(f"{size}: {ours} over {theirs}", seconds[ours], seconds[theirs], must=must)
        # before an update and after one; later a rounding changes which token is dropped
        pairs = list(zip(losses[ours], losses[theirs], strict=True))[:2]
        gap = max(abs(one - other) / other for one, other in pairs)
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
