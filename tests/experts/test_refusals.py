"""What cannot be done with experts is one sentence on every rank, before a token is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import xds

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}


class Otherwise(nn.Module):
    """Experts that are called with their arguments in another order, and names."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        return torch.stack([x @ up for up in self.up]).sum(0)


class Around(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        index = torch.zeros(len(x), 1, dtype=torch.int64)
        out: Tensor = self.experts(x, index, torch.ones(len(x), 1), **more)
        return out.square().mean()


class Product(nn.Module):
    """Called as experts are, and not the sum of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 8))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states * self.up[top_k_index[:, 0]] + self.up.sum(0)


def mixtral(**sizes: Any) -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, "num_local_experts": 4, **sizes}))


def start(make: Any, section: dict[str, Any], more: dict[str, Any]) -> tuple[str, int]:
    """The error of xds.initialize or of a forward, and the bytes of tokens sent before it."""
    size = section.get("autoep_size", 2)
    size = size[dist.get_rank()] if isinstance(size, list) else size
    given = config(2, expert_parallel={"enabled": True, **section, "autoep_size": size})
    engine = None
    with pytest.raises((xds.UsageError, xds.ConfigError)) as caught:
        engine = xds.initialize(make(), given)
        engine(torch.ones(3, 8), **more)
    sent = 0 if engine is None else engine.bytes_sent().get("experts", 0)
    if engine is not None:
        engine.destroy()
    return str(caught.value), sent


# what it shows: model, section, keywords of the forward, ranks, a part of the sentence
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], int, str]] = {
    "experts": (mixtral, {"autoep_size": 3}, {}, 3, "it must divide the experts of every layer"),
    "ranks": (mixtral, {"autoep_size": 4}, {}, 2, "must divide the data, sequence and tensor ranks"),
    "pattern": (mixtral, {"expert_pattern": "*.ffn"}, {}, 2, "it matches none"),
    "choices": (lambda: mixtral(num_experts_per_tok=5), {}, {}, 2, "top_k = 5 is more than the 4"),
    "signature": (lambda: Around(Otherwise()), {}, {}, 2, "(Otherwise) is not called with"),
    "named": (
        *(lambda: Around(Otherwise()), {"expert_pattern": "experts"}, {}, 2),
        "is not called with (hidden_states, top_k_index, top_k_weights)",
    ),
    "sum": (lambda: Around(Product()), {}, {}, 2, "is not the weighted sum of its experts"),
    "call": (lambda: Around(Product()), {}, {"scale": 1.0}, 2, "is called with [3, 8], [3, 1], [3, 1], float"),
    "different": (mixtral, {"autoep_size": [1, 2]}, {}, 2, "expert_parallel.autoep_size"),
    "none": (lambda: nn.Linear(8, 8), {}, {}, 2, "the model has no module of experts"),
    "negative": (mixtral, {"autoep_size": -1}, {}, 2, "expert_parallel.autoep_size = -1"),
    "inside": (mixtral, {"expert_tensor_parallel_size": 2}, {}, 2, "an expert is whole on its rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_on_every_rank(name: str) -> None:
    make, section, more, world_size, words = CASES[name]
    for text, sent in run_ranks(start, world_size, make, section, more):
        assert words in text and text.count("\n") <= 1, text
        assert not sent
