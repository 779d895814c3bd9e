"""A small GPT over bytes, in plain PyTorch without xds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT. Letters below: B batch, T tokens, C width, H heads, V vocabulary."""

    layers: int = 4
    width: int = 160
    heads: int = 5
    context: int = 128
    vocabulary: int = 256  # one entry for each byte
    tied_head: bool = False  # the output layer is the token embedding


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each token attends to itself and to those before it; [B, H, T, C / H] each."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention. `attend` may be replaced: `xds.tensor.DistributedAttention` for long sequences."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attend = attend
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # [B, T, C] -> [B, T, C]
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, C / H]
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if mask is None:
            y = self.attend(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each applied to the normalised input and added to it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # [B, T, C] -> [B, T, C]
        if mask is None:
            x = x + self.attention(self.attention_norm(x))
        else:
            x = x + self.attention(self.attention_norm(x), mask)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def within_samples(positions: Tensor) -> Tensor:
    """Which tokens a token of packed rows attends to: those before it in its sample, and itself.

    positions: [B, T], 0 where a sample begins. Returns [B, 1, T, T], bool.
    """
    samples = (positions == 0).cumsum(1)
    return (samples[:, None, :, None] == samples[:, None, None, :]).tril()


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied_head:
            self.head.weight = self.tokens.weight
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            # 2 layers write into the residual stream in each block: keep its variance at the end
            # what it is at the start. (`apply` reaches a block after the layers inside it.)
            for layer in (module.attention.out, module.down):
                nn.init.normal_(layer.weight, std=0.02 / (2 * self.shape.layers) ** 0.5)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of the next token for each of `tokens` [B, T]; with `targets`, the loss.

        positions: [1 or B, T] of the tokens; None: 0 to T - 1.
        mask: of packed samples, see `within_samples`; None: a token attends to all before it.
        """
        x = self.tokens(tokens)
        if positions is None:
            x = x + self.positions.weight[: tokens.shape[1]]
        else:
            x = x + self.positions(positions)
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def generate(model: nn.Module, tokens: Tensor, count: int, context: int, seed: int) -> Tensor:
    """Append `count` sampled bytes to `tokens` [1, T].

    `model` may be an engine. All ranks must call this together and draw the same bytes: when
    parameters are sharded, each forward pass is a collective operation.
    """
    generator = torch.Generator(tokens.device).manual_seed(seed)
    for _ in range(count):
        logits = model(tokens[:, -context:])[0, -1].float()
        chances = (logits / 0.8).softmax(dim=-1)
        tokens = torch.cat(
            [tokens, torch.multinomial(chances, 1, generator=generator)[None]], dim=1
        )
    return tokens
