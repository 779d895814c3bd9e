"""The models that are timed: a byte-level GPT with its blocks in a ModuleList, and a tiny one.

Plain PyTorch without dropout, so that every contestant must reach the same loss. Each model
takes one batch and returns its scalar loss.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 256  # bytes
CONTEXT = 128  # tokens of a sequence, where a benchmark sets no other number


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT; `batch` sequences of `context` tokens per rank and step."""

    width: int
    layers: int
    heads: int
    context: int = CONTEXT
    batch: int = 1


SHAPES = {
    "11M": Shape(width=384, layers=6, heads=6),
    "30M": Shape(width=512, layers=9, heads=8),
    "40M": Shape(width=640, layers=8, heads=10),
}


class Block(nn.Module):
    """Pre-norm attention and MLP: 12 * width^2 parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Byte-level GPT; `forward(tokens)` with (batch, context + 1) bytes returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in fp32."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TinyBlock(nn.Module):
    """Twenty small linear layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 32) to the same."""
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


class Tiny(nn.Module):
    """200 x Linear(32, 32): 400 parameters, so that the overhead dominates the cost."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        """Mean squared distance between the output and the reversed input."""
        y = x
        for block in self.blocks:
            y = block(y)
        return (y.float() - x.flip(1).float()).square().mean()


def make_model(name: str, context: int = CONTEXT) -> nn.Module:
    """The same weights on every rank, for every contestant. context: tokens of a sequence."""
    torch.manual_seed(1)
    if name == "tiny":
        return Tiny()
    model = GPT(replace(SHAPES[name], context=context))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def make_batches(name: str, rank: int, count: int, context: int = CONTEXT) -> list[Tensor]:
    """`count` batches of this rank: windows of the standard library's sources, or noise."""
    generator = torch.Generator().manual_seed(100 + rank)
    if name == "tiny":
        return [torch.randn(32, 32, generator=generator) for _ in range(count)]
    shape = SHAPES[name]
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(library.glob("*.py"))[:40]
    text = torch.frombuffer(bytearray(b"".join(s.read_bytes() for s in sources)), dtype=torch.uint8)
    batches = []
    for _ in range(count):
        last = len(text) - context - 1
        starts = torch.randint(last, (shape.batch,), generator=generator).tolist()
        windows = [text[start : start + context + 1].long() for start in starts]
        batches.append(torch.stack(windows))
    return batches
