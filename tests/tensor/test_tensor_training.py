"""Tests of sliced layers under the engine: five steps equal those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from pipeline_runs import worst
from torch import nn
from warm_ranks import warm

import xds

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

STEPS, SAMPLES, LENGTH, VOCAB = 5, 2, 12, 61
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-3}


def build(name: str) -> nn.Module:
    """A small model of transformers with four heads, two of keys and values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    config = AutoConfig.for_model(name, **sizes, **heads, use_cache=False, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config)


def batch(step: int, data_rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(50 * step + data_rank)
    ids = torch.randint(3, VOCAB, (SAMPLES, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def train(name: str, config: dict[str, Any]) -> list[tuple[float, float]]:
    engine = xds.initialize(build(name), config)
    found = []
    for step in range(STEPS):
        loss = engine(**batch(step, engine.dp_rank)).loss
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


@cache
def one_process(name: str, data: int) -> list[tuple[float, float]]:
    model: nn.Module = build(name)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, **ADAMW)
    found = []
    for step in range(STEPS):
        losses = [model(**batch(step, rank)).loss / data for rank in range(data)]
        for loss in losses:
            loss.backward()
        norm = nn.utils.clip_grad_norm_(params, float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        found.append((sum(loss.item() for loss in losses), norm.item()))
    return found


def config_of(tensor: int, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"tp_size": tensor},
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("data", [1, 2])
def test_llama_in_two_slices_equals_one_process(data: int, stage: int) -> None:
    by_rank = warm(2 * data).run(train, "llama", config_of(2, stage))
    for first, second in zip(by_rank[::2], by_rank[1::2], strict=True):
        assert first == second
    mean = [
        (sum(step[0] for step in steps) / data, steps[0][1])
        for steps in zip(*by_rank[::2], strict=True)
    ]
    assert worst(mean, one_process("llama", data)) <= 1e-6


def train_in_stages(name: str, config: dict[str, Any]) -> list[tuple[float, float]]:
    engine = xds.initialize(build(name), config)
    found = []
    for step in range(STEPS):
        batches = [batch(step, 2 * engine.dp_rank), batch(step, 2 * engine.dp_rank + 1)]
        loss = engine.train_batch(iter(batches))
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_slices_in_two_pipeline_stages_equal_one_process(stage: int) -> None:
    config = config_of(2, stage) | {"gradient_accumulation_steps": 2, "pipeline": {"stages": 2}}
    by_rank = warm(4).run(train_in_stages, "llama", config)
    assert all(found == by_rank[0] for found in by_rank)
    assert worst(by_rank[0], one_process("llama", 2)) <= 1e-6
