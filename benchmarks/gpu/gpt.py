"""The GPT that is trained: plain PyTorch with scaled_dot_product_attention, and its sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT. Letters below: B batch, T tokens, C width, H heads."""

    layers: int
    width: int
    heads: int
    context: int = 1024
    vocabulary: int = 50304

    @property
    def numel(self) -> int:
        """Parameters of `GPT`."""
        norms = 2 * self.width * (2 * self.layers + 1)
        return 12 * self.layers * self.width**2 + self.embedding_numel + norms

    @property
    def embedding_numel(self) -> int:
        """Parameters of both embeddings; the first is the output layer as well."""
        return (self.vocabulary + self.context) * self.width

    def flops(self, tokens: int) -> float:
        """Of one step without recomputation: 6 a parameter and token, and attention."""
        matrices = self.numel - self.context * self.width
        attention = 12 * self.layers * self.width * self.context
        return float(tokens) * (6 * matrices + attention)


class Block(nn.Module):
    """Attention and MLP on normalised input: 12 C^2 parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] to the same."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, C / H]
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """The output layer is the token embedding. Weights are random.

    recomputes: blocks are recomputed in backward. The engine of xds does it by itself.
    """

    def __init__(self, shape: Shape, *, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T + 1] token numbers to the mean loss, [] fp32."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(
    shape: Shape, device: torch.device, dtype: torch.dtype, *, recomputes: bool = False
) -> GPT:
    """A GPT that is drawn on `device`, in `dtype`: no copy of it is ever on the host."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(1)
        with torch.device(device):
            return GPT(shape, recomputes=recomputes)
    finally:
        torch.set_default_dtype(before)


def draw(shape: Shape, num_tokens: int, device: torch.device) -> Tensor:
    """Random token numbers of a step, [num_tokens / T, T + 1]."""
    size = (num_tokens // shape.context, shape.context + 1)
    return torch.randint(shape.vocabulary, size, device=device)


__all__ = ["GPT", "Block", "Shape", "build", "draw"]
