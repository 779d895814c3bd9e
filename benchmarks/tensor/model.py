"""The models that are cut: a GPT whose attention counts its heads from the width that it gets.

Plain PyTorch without dropout, so that every contestant must reach the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
