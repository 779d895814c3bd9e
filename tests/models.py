"""Test helper: one tiny language model, and variants of it with the features of real models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, DEPTH = 61, 24, 3  # odd sizes: slots and shards need padding
FEATURES = (
    "plain",
    "tied",
    "tied_blocks",
    "frozen",
    "lora",
    "unused",
    "divergent",
    "reused",
    "checkpointed",
    "checkpointed_reentrant",
    "compiled",
    "compiled_blocks",
    "mixed_shapes",
)


class Block(nn.Module):
    """A residual MLP block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LoraBlock(Block):
    """A block whose big matrices are frozen and corrected by small trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, 2) * 0.1)
        self.b = nn.Parameter(torch.zeros(2, 3 * WIDTH))
        for part in (self.norm, self.up, self.down):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.gelu(self.up(h) + h @ self.a @ self.b))


class TinyModel(nn.Module):
    """Embedding, blocks, norm, head; `feature` is one of FEATURES. Returns the loss."""

    def __init__(self, feature: str = "plain") -> None:
        super().__init__()
        self.feature = feature
        kind = LoraBlock if feature == "lora" else Block
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([kind() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        if feature == "tied":
            self.head.weight = self.embed.weight
        if feature == "tied_blocks":
            self.blocks[2].up.weight = self.blocks[0].up.weight
        if feature == "frozen":
            self.embed.requires_grad_(False)
            self.blocks[1].requires_grad_(False)
            self.blocks[2].up.requires_grad_(False)
        if feature == "unused":
            self.spare = nn.Linear(WIDTH, WIDTH)
            self.empty = nn.Parameter(torch.empty(0))
        if feature == "mixed_shapes":
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
            self.gain = nn.Parameter(torch.tensor(1.0))

    def _block(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.feature == "checkpointed":
            return checkpoint(block, x, use_reentrant=False)
        if self.feature == "checkpointed_reentrant":
            return checkpoint(block, x, use_reentrant=True)
        return block(x)

    def forward(self, tokens: Tensor, rank: int = 0) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for number, block in enumerate(self.blocks):
            if self.feature == "unused" and number == 1:
                continue
            if self.feature == "divergent" and number == 1 + rank % 2 and rank < 2:
                x = x + 0.0 * block(x).detach()  # gathered by every rank, no gradient on this one
                continue
            x = self._block(block, x)
            if self.feature == "reused" and number == 0:
                x = self._block(block, x)
        if self.feature == "mixed_shapes":
            x = x + self.gain * self.conv(x.transpose(1, 2)).transpose(1, 2)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def build(feature: str) -> Any:
    """The model, the same values on every call; compiled where the feature requires it."""
    torch.manual_seed(1234)
    model = TinyModel(feature)
    if feature == "compiled":
        return torch.compile(model, backend="aot_eager")
    if feature == "compiled_blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    return model


def micro_batch(step: int, micro_step: int, samples: int = 4) -> Tensor:
    """[samples, 9] tokens, the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * step + micro_step)
    return torch.randint(0, VOCAB, (samples, 9), generator=generator)
