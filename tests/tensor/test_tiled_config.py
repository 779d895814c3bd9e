"""Tiles that the config asks for: steps equal those of one process without tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tensor_cases
import torch
from helpers import run_ranks
from pipeline_runs import SAME, worst
from tensor_cases import STEPS, Case, batches, build, one_process
from torch import nn

import xds

pytest.importorskip("transformers", reason="pip install -e '.[test]'")
TILES = {"tiled_mlp": 5, "tiled_loss": 7}


def train(case: Case, tiles: dict[str, Any], more: dict[str, Any]) -> tuple[Any, int]:
    """Loss and norm of each step; the most logits that any module gave in training."""
    model = build(case.model)
    engine = xds.initialize(model, case.config() | {"sequence": tiles} | more)
    largest = 0

    def note(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal largest
        if isinstance(output, torch.Tensor) and output.shape[-1] == tensor_cases.VOCAB:
            largest = max(largest, output.numel())

    handles = [module.register_forward_hook(note) for module in engine.module.modules()]
    found = []
    for step in range(STEPS):
        loss = engine.train_batch(batches(case.model, step, engine.dp_rank))
        found.append((loss.item(), engine.get_global_grad_norm()))
    for handle in handles:
        handle.remove()
    if case.pipe == 1:
        batch = next(batches(case.model, 0, 0))
        trained = engine(**batch)
        assert (trained.logits is None) is ("tiled_loss" in tiles)
        if case.tensor > 1:
            batch.pop("labels")  # with labels each rank has its columns
        with torch.no_grad():
            assert engine(**batch).logits.shape[-1] == tensor_cases.VOCAB
    engine.destroy()
    assert "forward" not in model.__dict__ and "_loss_function" not in model.__dict__
    return found, largest


SLOW = [
    (Case("llama", 1, 1, 1, 1, 0), {}),
    (Case("llama", 1, 2, 1, 1, 1), {"activation_checkpointing": {"enabled": True}}),
    (Case("gpt2", 1, 2, 1, 1, 2), {}),
    (Case("llama", 2, 1, 1, 1, 3), {}),
]


@pytest.mark.parametrize(
    ("case", "more"),
    [
        (Case("llama", 1, 2, 1, 1, 3), {}),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW),
    ],
    ids=lambda one: one.name if isinstance(one, Case) else "",
)
def test_tiles_of_the_config_equal_one_process(case: Case, more: dict[str, Any]) -> None:
    for found, largest in run_ranks(train, case.mesh.size, case, TILES, more):
        assert worst(found, one_process(case.model, case.data)) <= SAME
        assert largest == 0


CUT_HEAD = {"tensor_parallel": {"tp_size": 2, "vocab_parallel_lm_head": True}}


@pytest.mark.parametrize(
    ("case", "more"),
    [
        (Case("llama", 1, 1, 1, 2, 1), {}),  # the head's logits would be gathered
        (Case("gpt2", 1, 1, 1, 2, 2), CUT_HEAD),  # tied
        (Case("llama", 1, 1, 2, 1, 2), {}),
        *(
            pytest.param(Case(*case), more, marks=pytest.mark.slow)
            for case, more in (
                (("qwen3", 1, 1, 2, 2, 3), CUT_HEAD),
                (("llama", 2, 1, 1, 2, 0), CUT_HEAD),
                (("llama", 2, 1, 2, 1, 3), {}),
            )
        ),
    ],
    ids=lambda one: one.name if isinstance(one, Case) else "",
)
def test_tiles_with_slices_and_sequence_ranks_equal_one_process(
    case: Case, more: dict[str, Any]
) -> None:
    for found, largest in run_ranks(train, case.mesh.size, case, TILES, more):
        assert worst(found, one_process(case.model, case.data)) <= SAME
        assert largest == 0 or case.sequence > 1  # the proof of sequences computes a few


def refused(case: Case, tiles: dict[str, Any], kind: str) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 66}
    model = build("gpt")
    if kind:
        more = {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8}
        config = AutoConfig.for_model(kind, **sizes, **more, use_cache=False, pad_token_id=0)
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(xds.UsageError) as caught:
        config = case.config() | {"sequence": tiles}
        if case.tensor > 1:
            config["tensor_parallel"]["plan"] = {"lm_head": "rowwise_split_input"}
        engine = xds.initialize(model, config)
        engine.train_batch(batches("llama", 0, 0))
    return str(caught.value)


@pytest.mark.parametrize(
    ("tiles", "kind", "tensor", "text"),
    [
        ({"tiled_mlp": 4}, "", 1, "has no module called mlp or feed_forward or ffn"),
        ({"tiled_mlp": 4, "tiled_modules": ["fc"]}, "llama", 1, "no module called fc"),
        ({"tiled_loss": 4}, "", 1, "no causal language model"),
        ({"tiled_loss": 4}, "gemma2", 1, "changes its logits between head and loss"),
        ({"tiled_loss": 4}, "llama", 2, "cut the head by rows"),
    ],
)
def test_what_cannot_run_in_tiles_is_refused(
    tiles: dict[str, Any], kind: str, tensor: int, text: str
) -> None:
    case = replace(Case("llama", 1, 1, 1, 1, 0), tensor=tensor)
    assert all(text in said for said in run_ranks(refused, tensor, case, tiles, kind))


def with_adapters(tiles: dict[str, Any], stages: int) -> list[float]:
    """Losses of a model in peft's wrapper."""
    import peft

    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules="all-linear")
    model = peft.get_peft_model(build("llama"), lora)
    config = Case("llama", stages, 1, 1, 1, 1).config()
    engine = xds.initialize(model, config | ({"sequence": tiles} if tiles else {}))
    losses = [engine.train_batch(batches("llama", step, 0)).item() for step in range(2)]
    engine.destroy()
    return losses


@pytest.mark.parametrize("stages", [1, 2])
def test_the_loss_of_a_model_with_adapters_runs_in_tiles(stages: int) -> None:
    pytest.importorskip("peft", reason="pip install peft")
    wanted = run_ranks(with_adapters, stages, {}, stages)
    found = run_ranks(with_adapters, stages, {"tiled_loss": 5}, stages)
    for losses, expected in zip(found, wanted, strict=True):
        assert losses == pytest.approx(expected, rel=SAME)
