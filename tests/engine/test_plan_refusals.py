"""A plan refuses what the engine refuses, with the same sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import Tensor, nn

import xds
from xds.engine.config.config import parse_config
from xds.engine.planning.models import ModelSource
from xds.engine.planning.plan import make_plan

CUT = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
TOKENS = {**CUT, "blocks.*.norm": "sequence_parallel"}
RECOMPUTED = {"enabled": True, "partition_activations": True}
QUANTIZED = {"start_bits": 8, "target_bits": 8}
# name -> (ranks, the config, a part of the sentence)
REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "tokens, compile": (
        2,
        {"tensor_parallel": {"tp_size": 2, "plan": TOKENS}, "compile": {"enabled": True}},
        "does not work with compile.enabled",
    ),
    "tokens, partitioned activations": (
        2,
        {
            "tensor_parallel": {"tp_size": 2, "plan": TOKENS},
            "activation_checkpointing": RECOMPUTED,
        },
        "does not work with activation_checkpointing.partition_activations",
    ),
    "dropout, compile": (
        2,
        {"tensor_parallel": {"tp_size": 2, "plan": CUT}, "compile": {"enabled": True}},
        "blocks of Model have dropout",
    ),
    "backend": (1, {"compile": {"enabled": True, "backend": "none"}}, "torch.compile refuses"),
    "sequences": (2, {"sequence_parallel_size": 2}, "its sequences cannot be cut"),
    "tiled MLP": (1, {"sequence": {"tiled_mlp": True}}, "has no module called mlp"),
    "tiled loss": (1, {"sequence": {"tiled_loss": True}}, "no causal language model"),
    "sparse attention": (
        1,
        {"sparse_attention": {"mode": "fixed", "block": 16}},
        "is no model of transformers",
    ),
    "compression": (
        1,
        {
            "compression_training": {
                "weight_quantization": {
                    "shared_parameters": {"enabled": True, "schedule_offset": 1},
                    "different_groups": {"a": {"params": QUANTIZED, "modules": ["nothing"]}},
                }
            }
        },
        "nothing",
    ),
    "layer drop": (
        1,
        {"progressive_layer_drop": {"enabled": True, "keywords": True}},
        "does not take progressive_layer_drop",
    ),
    "curriculum": (
        1,
        {
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": 8,
                "max_difficulty": 16,
                "schedule_type": "fixed_linear",
                "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 8},
            }
        },
        "does not take curriculum_seqlen",
    ),
}


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.up(self.norm(x)).relu()))


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Source(ModelSource):
    name = "refused"

    def __init__(self, dropout: float) -> None:
        self._dropout = dropout

    def build(self) -> nn.Module:
        return Model(self._dropout)

    def batch(self, micro_batch_size: int) -> Any:
        return torch.zeros(micro_batch_size, 8, 16)


def refusal(source: Source, config: dict[str, Any]) -> str:
    """What an engine says."""
    try:
        xds.initialize(source.build(), config)
    except xds.XdsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_refuses_what_the_engine_refuses(name: str) -> None:
    num_ranks, more, part = REFUSED[name]
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam, **more}
    source = Source(0.1 if "dropout" in name else 0.0)
    said = run_ranks(refusal, num_ranks, source, config)[0]
    assert part in said
    with pytest.raises(xds.XdsError) as caught:
        make_plan(source, parse_config(config), num_ranks, 8)
    assert part in str(caught.value) and str(caught.value) in said
