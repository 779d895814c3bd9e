"""Test helper: trains small models in pipeline stages and in one process, and compares loss and norm."""

from __future__ import annotations

from typing import Any

import torch
from runs import plain
from torch import Tensor, nn

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


class Known(Model):
    """Says with which inputs it can run, as models of transformers do."""

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return dict(zip(("tokens", "targets"), torch.zeros(2, 1, 3, dtype=torch.long), strict=True))


def batches(step: int, data_rank: int, count: int, samples: int = 2) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of one data rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    found = torch.randint(0, VOCAB, (count, 2, samples, LENGTH), generator=generator)
    return [(pair[0], pair[1]) for pair in found]


def reference(
    model: nn.Module, steps: int, data_ranks: int, count: int, clip: float = 0.0
) -> list[tuple[float, float]]:
    """Loss and norm of each step in one process."""

    def parts(step: int) -> list[tuple[Tensor, Tensor]]:
        return [batch for rank in range(data_ranks) for batch in batches(step, rank, count)]

    return [tuple(step) for step in plain(model, steps, parts, clip=clip)]


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


def worst(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    """The largest relative difference."""
    pairs = [
        (a, b) for f, e in zip(found, expected, strict=True) for a, b in zip(f, e, strict=True)
    ]
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)
