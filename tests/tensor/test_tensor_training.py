"""Tests of sliced layers under the engine: five steps equal those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers import run_ranks
from pipeline_runs import SAME, worst
from torch import nn

import xds

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

STEPS, SAMPLES, LENGTH, VOCAB = 5, 2, 12, 61
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-3}


def build(name: str) -> nn.Module:
    """A small model of transformers with four heads, two of keys and values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
    }
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


SLOW = [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 2)]


@pytest.mark.parametrize(
    ("data", "stage"),
    [(2, 1), (2, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_llama_in_two_slices_equals_one_process(data: int, stage: int) -> None:
    by_rank = run_ranks(train, 2 * data, "llama", config_of(2, stage))
    for first, second in zip(by_rank[::2], by_rank[1::2], strict=True):
        assert first == second
    mean = [
        (sum(step[0] for step in steps) / data, steps[0][1])
        for steps in zip(*by_rank[::2], strict=True)
    ]
    assert worst(mean, one_process("llama", data)) <= SAME


def train_in_stages(name: str, config: dict[str, Any]) -> list[tuple[float, float]]:
    engine = xds.initialize(build(name), config)
    found = []
    for step in range(STEPS):
        batches = [batch(step, 2 * engine.dp_rank), batch(step, 2 * engine.dp_rank + 1)]
        loss = engine.train_batch(iter(batches))
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_slices_in_two_pipeline_stages_equal_one_process(stage: int) -> None:
    config = config_of(2, stage) | {"gradient_accumulation_steps": 2, "pipeline": {"stages": 2}}
    by_rank = run_ranks(train_in_stages, 4, "llama", config)
    assert all(found == by_rank[0] for found in by_rank)
    assert worst(by_rank[0], one_process("llama", 2)) <= SAME


@pytest.mark.parametrize(
    "name", ["qwen3", pytest.param("phi3", marks=pytest.mark.slow)]
)  # norms of heads; fused layers
def test_models_with_other_words_equal_one_process(name: str) -> None:
    found = run_ranks(train, 2, name, config_of(2, 2))[0]
    assert worst(found[:3], one_process(name, 1)[:3]) <= SAME


class Mlp(nn.Module):
    """Biases on both sides, a width that three ranks cannot share evenly, packed gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.packed = nn.Linear(10, 2 * 13)
        self.down = nn.Linear(13, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.packed(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Mlps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


PLAN = {"blocks.*.packed": "packed_colwise", "blocks.*.down": "rowwise"}


def train_mlps(config: dict[str, Any]) -> tuple[list[float], int]:
    """The losses, and the bytes of sums that this rank sent after the first step, which has the proof."""
    torch.set_num_threads(1)
    engine = xds.initialize(Mlps(), config)

    def sent() -> int:
        return sum(found.sent_bytes.get("tensor sums", 0) for found in engine._parts.opened)

    losses, first = [], 0
    for step in range(3):
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(step))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        first = first or sent()
    found = sent() - first
    engine.destroy()
    return losses, found


def test_uneven_packed_slices_on_three_ranks_and_the_bytes_of_their_sums() -> None:
    config = config_of(3, 1) | {"train_micro_batch_size_per_gpu": 4}
    config["tensor_parallel"]["plan"] = PLAN
    by_rank = run_ranks(train_mlps, 3, config)
    model = Mlps()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for step in range(3):
        loss = model(torch.randn(4, 10, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for found, sent in by_rank:
        assert found == by_rank[0][0]
        assert found == pytest.approx(losses, rel=1e-6)
        one_sum = 2 * (3 - 1) * 4 * 10 * 4 // 3  # of activations [4, 10] in fp32
        assert sent == 2 * 2 * 2 * one_sum  # steps, blocks, forward and backward


def initialized_again(config: dict[str, Any]) -> None:
    engine = xds.initialize(Mlps(), config)
    engine.destroy()
    with pytest.raises(xds.UsageError, match="build the model again"):
        xds.initialize(engine.module, config)


def test_a_model_in_slices_is_not_taken_again() -> None:
    config = config_of(2, 0) | {"train_micro_batch_size_per_gpu": 4}
    config["tensor_parallel"]["plan"] = PLAN
    run_ranks(initialized_again, 2, config)


def bad_plan(plan: dict[str, str] | None, tensor: int) -> str:
    config = config_of(tensor, 0) | {"train_micro_batch_size_per_gpu": 4}
    config["tensor_parallel"]["plan"] = plan
    with pytest.raises(xds.UsageError) as caught:
        xds.initialize(Mlps(), config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.up": "colwise"}, "matches no module"),
        ({"blocks.*.down": "columnwise"}, "must be one of"),
        ({"blocks.*.norm": "colwise"}, "only linear layers"),
    ],
)
def test_a_plan_that_does_not_fit_is_one_sentence_on_every_rank(
    plan: dict[str, str] | None, message: str
) -> None:
    assert all(message in found for found in run_ranks(bad_plan, 2, plan, 2))


def different_batches(config: dict[str, Any]) -> str:
    engine = xds.initialize(Mlps(), config)
    with pytest.raises(xds.UsageError) as caught:
        engine(torch.full((4, 10), float(engine.global_rank)))
    return str(caught.value)


def test_different_batches_on_a_tensor_group_are_one_sentence_on_every_rank() -> None:
    config = config_of(2, 1) | {"train_micro_batch_size_per_gpu": 4}
    config["tensor_parallel"]["plan"] = PLAN
    assert all("different batches" in text for text in run_ranks(different_batches, 2, config))


NOT_PACKED = {"blocks.*.packed": "colwise", "blocks.*.down": "rowwise"}


def unproven(plan: dict[str, str], kind: str) -> str:
    config = config_of(2, 3) | {"train_micro_batch_size_per_gpu": 4}
    config["tensor_parallel"]["plan"] = plan
    engine = xds.initialize(Even(), config)
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    with pytest.raises(xds.UsageError) as caught:
        engine(x[:1].expand(4, -1) if kind == "equal" else x)
    return str(caught.value)


class Even(Mlps):
    """A width that two ranks share evenly, so that a wrong plan still has fitting shapes."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.packed, block.down = nn.Linear(10, 24), nn.Linear(12, 10)


@pytest.mark.parametrize("samples", ["different", "equal"])
def test_a_plan_that_computes_something_else_is_found_in_the_first_forward(samples: str) -> None:
    for text in run_ranks(unproven, 2, NOT_PACKED, samples):
        assert "blocks.0 computes something else in 2 slices than whole" in text
        assert "the output of down differs" in text


HEADS = {"model.layers.*.self_attn.q_norm": None, "model.layers.*.self_attn.k_norm": None}


def without_norms() -> str:
    from xds.tensor.plan import plan_of_model

    model = build("qwen3")
    plan = {name: word for name, word in plan_of_model(model).items() if name not in HEADS}
    config = config_of(2, 0)
    config["tensor_parallel"]["plan"] = plan
    engine = xds.initialize(model, config)
    with pytest.raises(xds.UsageError) as caught:
        engine(**batch(0, 0))
    return str(caught.value)


def test_a_gradient_that_is_not_summed_is_found_in_the_first_forward() -> None:
    for text in run_ranks(without_norms, 2):
        assert "the gradient of self_attn.q_norm.weight differs" in text


def same_tokens(name: str, trained: tuple[str, ...]) -> tuple[float, float]:
    """The loss of two slices, and of the whole model."""
    model = build(name)
    for key, param in model.named_parameters():
        param.requires_grad_(any(part in key for part in trained))
    ids = torch.full((SAMPLES, 48), 5)
    wanted = model(input_ids=ids, labels=ids).loss.item()
    engine = xds.initialize(model, config_of(2, 1))
    found = engine(input_ids=ids, labels=ids).loss.item()
    engine.destroy()
    return found, wanted


@pytest.mark.parametrize(
    ("name", "trained"), [("llama", ("q_proj", "k_proj")), ("qwen2", ("k_proj.bias",))]
)
def test_gradients_that_are_zero_but_for_rounding_are_not_refused(
    name: str, trained: tuple[str, ...]
) -> None:
    for found, wanted in run_ranks(same_tokens, 2, name, trained):
        assert found == pytest.approx(wanted, rel=1e-5)
