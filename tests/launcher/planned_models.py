"""Test helper: small models for plans, and what real ranks hold and send."""

from __future__ import annotations

from typing import Any

import runs
import torch
from pipeline_runs import LENGTH, Model, batches
from torch import nn

import xds
from xds.pipe import LayerSpec, PipelineModule

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
SAMPLES = 2


def plain() -> tuple[nn.Module, Any]:
    return Model(), _batch()


def tied() -> tuple[nn.Module, Any]:
    return Model(tied=True), _batch()


def frozen() -> tuple[nn.Module, Any]:
    return Model(frozen=2), _batch()


def without_batch() -> nn.Module:
    return Model()


def llama() -> tuple[nn.Module, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **sizes, **heads)
    tokens = (torch.arange(SAMPLES * 12) * 7 % 61).view(SAMPLES, 12)
    return AutoModelForCausalLM.from_config(config), {"input_ids": tokens, "labels": tokens}


def mixture() -> tuple[nn.Module, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 997}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    tokens = torch.randint(0, 997, (SAMPLES, 256), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": tokens, "labels": tokens}


class Listed(nn.Module):
    """Two blocks of experts in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(997, 32), nn.Linear(32, 997)
        self.blocks = nn.ModuleList(ListedBlock() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class ListedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weights, index = self.gate(rows).softmax(-1).topk(2, -1)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(index == number)
            result = result.index_add(0, token, expert(rows[token]) * weights[token, choice, None])
        return result.view_as(x)


def listed() -> tuple[nn.Module, Any]:
    return Listed(), mixture()[1]


def layers() -> nn.Module:
    """A list of layers, of which each rank builds its own."""
    return PipelineModule([LayerSpec(nn.Linear, 8, 8) for _ in range(5)], loss_fn=mean)


def mean(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def _batch() -> Any:
    tokens = torch.zeros((SAMPLES, LENGTH), dtype=torch.int64)
    return tokens, tokens.clone()


def config_of(
    stage: int, precision: str = "fp32", pipe: int = 1, tensor: int = 1, count: int = 1, **more: Any
) -> dict[str, Any]:
    """count: micro-batches of a step. more: see runs.config."""
    if pipe > 1:
        more["pipeline"] = {"stages": pipe, **more.get("pipeline", {})}
    if tensor > 1:
        more["tensor_parallel"] = {
            "tp_size": tensor,
            "plan": PLAN,
            **more.get("tensor_parallel", {}),
        }
    return runs.config(stage, precision, samples=SAMPLES, accumulation=count, **more)


def run(build: str, config: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """What this rank holds after two steps, and the bytes that it sent in the second."""
    torch.manual_seed(0)
    found = globals()[build]()
    engine = xds.initialize(found[0] if isinstance(found, tuple) else found, config)
    count, seen = engine.gradient_accumulation_steps(), []
    for step in range(2):  # the first proves the slices and sends shapes
        given = batches(step, engine.dp_rank, count, SAMPLES)
        if build in ("llama", "mixture", "listed"):
            given = [found[1]] * count
        if build == "layers":
            given = [(torch.ones(SAMPLES, 8), torch.ones(SAMPLES))] * count
        engine.train_batch(iter(given))
        seen.append(engine.bytes_sent())
    held = engine.memory_plan()
    engine.destroy()
    return held, {kind: seen[1][kind] - seen[0].get(kind, 0) for kind in seen[1]}
