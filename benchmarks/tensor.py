"""Compare the time of a training step on two tensor ranks with torch's `parallelize_module`.

    python benchmarks/tensor.py [--only PATTERN] [--rounds N] [--quick] [--patience MINUTES]

Contestants share two gloo processes of one thread and alternate. A row is the median of the ratios of
neighbouring turns. Their losses must agree; otherwise the row is invalid.
"""

from __future__ import annotations

import fnmatch
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from harness import (  # noqa: E402
    Plan,
    RankFailed,
    Row,
    Watch,
    alternate,
    comparison_parser,
    finish,
    ratio_row,
    run_ranks,
    slowest,
    wait_until_quiet,
)

TOLERANCE = 1e-4  # relative, of the last turn's loss
OURS, PEER = "xds", "DTensor"
LR = 1e-4

VOCABULARY = 256  # bytes
CUTS = {
    **dict.fromkeys(("q", "k", "v", "up"), "colwise"),
    **dict.fromkeys(("out", "down"), "rowwise"),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT; `batch` sequences of `context` tokens a step."""

    width: int
    layers: int
    head_dim: int
    context: int
    batch: int


SHAPES = {
    "tiny": Shape(width=32, layers=1, head_dim=8, context=8, batch=2),
    "40M": Shape(width=640, layers=8, head_dim=64, context=128, batch=1),
}


class Block(nn.Module):
    """Pre-norm attention and MLP: 12 * width^2 parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.head_dim = shape.head_dim
        self.norm_1 = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        batch, tokens, _ = x.shape
        same = self.norm_1(x)
        q, k, v = (
            layer(same).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Byte-level GPT; `forward(tokens)` with (batch, context + 1) bytes returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(size: str) -> GPT:
    """A model drawn from one seed."""
    torch.manual_seed(0)
    return GPT(SHAPES[size])


def make_batches(size: str, count: int) -> list[Tensor]:
    """`count` batches [batch, context + 1] of bytes."""
    shape, draw = SHAPES[size], torch.Generator().manual_seed(1)
    sizes = (shape.batch, shape.context + 1)
    return [torch.randint(VOCABULARY, sizes, generator=draw) for _ in range(count)]


@dataclass(frozen=True)
class Comparison:
    """One size of model, and the required ratio."""

    size: str
    must: float
    plan: Plan

    @property
    def name(self) -> str:
        """Of the row."""
        return f"step, tensor = 2, {self.size} fp32: {OURS} / {PEER}"


COMPARISONS = [
    Comparison("tiny", 0.5, Plan(rounds=11, block=20, warmup=10)),
    Comparison("40M", 1.0, Plan(rounds=11, block=1)),
]


def _xds(size: str) -> Callable[[Any], Any]:
    """A step of this engine."""
    import xds

    optimizer = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": optimizer,
        "zero_optimization": {"stage": 0},
        "tensor_parallel": {"tp_size": 2, "plan": {f"blocks.*.{k}": v for k, v in CUTS.items()}},
    }
    engine = xds.initialize(build(size), config)

    def step(tokens: Any) -> Any:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _dtensor(size: str) -> Callable[[Any], Any]:
    """A step of torch's slices, with its fused AdamW."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = build(size)
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {f"blocks.*.{k}": styles[v]() for k, v in CUTS.items()})
    sliced = [param for param in model.parameters() if isinstance(param, DTensor)]
    whole = [param for param in model.parameters() if not isinstance(param, DTensor)]
    optimizers = [
        torch.optim.AdamW(group, lr=LR, weight_decay=0.01, fused=True) for group in (sliced, whole)
    ]

    def step(tokens: Any) -> Any:
        loss = model(tokens)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def time_contestants(_: int, __: int, comparison: Comparison) -> dict[str, Any]:
    """One rank's part: build both contestants, alternate them."""
    plan = comparison.plan
    batches = make_batches(comparison.size, plan.warmup + plan.rounds * plan.block)
    built = {PEER: _dtensor(comparison.size), OURS: _xds(comparison.size)}
    seconds, losses = alternate({k: partial(_step, v, batches) for k, v in built.items()}, plan)
    return {"seconds": seconds, "losses": losses}


def _step(step: Callable[[Any], Any], batches: Any, index: int) -> Any:
    return step(batches[index])


def row_of(comparison: Comparison) -> Row:
    """Run a comparison."""
    row = Row(comparison.name, must=comparison.must)
    try:
        with Watch() as watch:
            ranks = run_ranks(time_contestants, 2, comparison)
    except RankFailed as error:
        print(error, flush=True)
        row.void = f"FAIL ({str(error).strip().splitlines()[-1]})"
        return row
    row.others_busy = watch.others
    row.samples = slowest([rank["seconds"] for rank in ranks])
    measured = ratio_row(row.name, row.samples[OURS], row.samples[PEER])
    row.value, row.low, row.high = measured.value, measured.low, measured.high
    row.note = (
        " / ".join(f"{statistics.median(row.samples[k]) * 1e3:.1f}" for k in (OURS, PEER)) + " ms"
    )
    block = comparison.plan.block
    a, b = (statistics.fmean(ranks[0]["losses"][name][-block:]) for name in (OURS, PEER))
    if not abs(a - b) <= TOLERANCE * abs(b):
        row.void = f"VOID (loss {a:.6f}, {PEER} {b:.6f})"
    return row


def main() -> int:
    """Run the chosen comparisons; 1 if a row misses its target."""
    parser = comparison_parser(__doc__ or "", example="*tiny*", quick="tiny, 3 rounds")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    rows = []
    for comparison in COMPARISONS[:1] if options.quick else COMPARISONS:
        chosen = comparison
        if rounds:
            chosen = replace(chosen, plan=replace(chosen.plan, rounds=rounds))
        if fnmatch.fnmatch(chosen.name, options.only):
            wait_until_quiet(options.patience)
            rows.append(row_of(chosen))
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
