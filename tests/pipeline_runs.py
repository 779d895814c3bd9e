"""Test helper: trains small models in pipeline stages and in one process, and compares loss and norm."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import xds

VOCAB, WIDTH, LENGTH = 48, 16, 6

# Of losses and norms of five steps in fp32, relative. Sums in another order drift apart at a large
# rate, by an amount that depends on the processor: 1e-7 to 4e-6 were seen.
SAME = 1e-5


class Block(nn.Module):
    """A residual block with a mask argument, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))) * mask


class Model(nn.Module):
    """Embeddings, blocks, a head; `tied`: the head shares the weight of the embedding."""

    def __init__(self, num_blocks: int = 4, *, tied: bool = False, frozen: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)
        if frozen:
            self.embed.requires_grad_(tied)
            self.position.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        mask = (tokens > 1).unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batches(step: int, data_rank: int, count: int, samples: int = 2) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of one data rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    found = torch.randint(0, VOCAB, (count, 2, samples, LENGTH), generator=generator)
    return [(pair[0], pair[1]) for pair in found]


def reference(
    model: nn.Module, steps: int, data_ranks: int, count: int, clip: float = 0.0
) -> list[tuple[float, float]]:
    """Loss and norm of each step in one process."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    found = []
    for step in range(steps):
        total = 0.0
        for data_rank in range(data_ranks):
            for tokens, targets in batches(step, data_rank, count):
                loss = model(tokens, targets)
                (loss / (count * data_ranks)).backward()
                total += loss.item() / (count * data_ranks)
        norm = torch.nn.utils.clip_grad_norm_(params, clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm.item()))
    return found


def config_of(stages: int, count: int, **changes: Any) -> dict[str, Any]:
    zero = changes.pop("zero", {})
    pipeline = changes.pop("pipeline", {})
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "pipeline": {"stages": stages, **pipeline},
        **changes,
    }


def train(model: nn.Module, config: dict[str, Any], steps: int) -> list[tuple[float, float]]:
    """Loss and norm of each step in pipeline stages, on this rank."""
    engine = xds.initialize(model, config)
    count = engine.gradient_accumulation_steps()
    found = []
    for step in range(steps):
        loss = engine.train_batch(iter(batches(step, engine.dp_rank, count)))
        found.append((loss.item(), engine.get_global_grad_norm() or 0.0))
    engine.destroy()
    return found


def worst(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    """The largest relative difference."""
    pairs = [
        (a, b) for f, e in zip(found, expected, strict=True) for a, b in zip(f, e, strict=True)
    ]
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)


def compare(changes: dict[str, Any], kinds: dict[str, Any], steps: int = 3) -> float:
    """On each rank: the largest difference to one process."""
    torch.manual_seed(0)
    model = Model(**kinds)
    stages = changes.pop("stages", 2)
    count = changes.pop("count", 4)
    data_ranks = dist.get_world_size() // stages
    clip = changes.get("gradient_clipping", 0.0)
    expected = reference(copy.deepcopy(model), steps, data_ranks, count, clip)
    return worst(train(model, config_of(stages, count, **changes), steps), expected)
