"""The GPT of examples/gpt with a mixture of experts in each block, in plain PyTorch without xds.

xds finds `Experts` by how it is called: (hidden_states, top_k_index, top_k_weights), as in transformers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpt"))

from model import GPT, Attention, Shape  # noqa: E402 (the file of examples/gpt)


@dataclass(frozen=True)
class Mixture(Shape):
    """Sizes. Letters below: T tokens, C width, E experts, K experts of a token, F width of an expert."""

    experts: int = 16
    choices: int = 2

    @property
    def expert_width(self) -> int:
        return 2 * self.width


class Experts(nn.Module):
    """E perceptrons of two layers, stacked."""

    def __init__(self, shape: Mixture) -> None:
        super().__init__()
        self.num_experts = shape.experts
        self.up = nn.Parameter(torch.empty(shape.experts, shape.expert_width, shape.width))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.width, shape.expert_width))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02 / (2 * shape.layers) ** 0.5)

    def forward(
        self,
        hidden_states: Tensor,  # [T, C]
        top_k_index: Tensor,  # [T, K]
        top_k_weights: Tensor,  # [T, K]
    ) -> Tensor:  # [T, C]
        """The sum of each token's experts by weight."""
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            hidden = F.gelu(F.linear(hidden_states[token], self.up[expert]))
            output = F.linear(hidden, self.down[expert]) * top_k_weights[token, choice, None]
            result = result.index_add(0, token, output.to(result.dtype))
        return result


class Router(nn.Module):
    """Chooses K experts for each token. `expert_bias` changes the choice, and no weight: xds moves it."""

    def __init__(self, shape: Mixture) -> None:
        super().__init__()
        self.choices = shape.choices
        self.scores = nn.Linear(shape.width, shape.experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(shape.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [T, C] -> [T, K], [T, K]
        scores = self.scores(x).sigmoid()
        index = (scores + self.expert_bias).topk(self.choices, dim=-1).indices
        weights = scores.gather(1, index)
        return index, weights / weights.sum(1, keepdim=True)


class MixtureBlock(nn.Module):
    """Attention and a mixture of experts, each applied to the normalised input and added to it."""

    def __init__(self, shape: Mixture) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.experts_norm = nn.LayerNorm(shape.width)
        self.router = Router(shape)
        self.experts = Experts(shape)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C] -> [B, T, C]
        x = x + self.attention(self.attention_norm(x))
        tokens = self.experts_norm(x).flatten(0, 1)
        return x + self.experts(tokens, *self.router(tokens)).view_as(x)


class MixtureGPT(GPT):
    """Predicts the next byte."""

    def __init__(self, shape: Mixture) -> None:
        super().__init__(shape)
        self.blocks = nn.ModuleList([MixtureBlock(shape) for _ in range(shape.layers)])
        self.blocks.apply(self._init)
