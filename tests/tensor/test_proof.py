"""Tests of the proof of a plan: in every precision, and with what a script does before the first forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import xds

WIDTH, HEADS = 64, 4


class Block(nn.Module):
    """Attention that cuts what it has into a fixed number of heads: a slice of it gets narrower heads."""

    def __init__(self, *, is_right: bool) -> None:
        super().__init__()
        self.is_right = is_right
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, WIDTH // HEADS) if self.is_right else (HEADS, -1)
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, shape).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, *, std: float, is_right: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block(is_right=is_right) for _ in range(2))
        for param in self.blocks.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def first_forward(precision: str, std: float, is_right: bool) -> str:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"tp_size": 2},
    }
    model = Net(std=std, is_right=is_right)
    if precision in ("bf16", "fp16"):
        config[precision] = {"enabled": True}
    elif precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif precision == "fp64":
        model.double()
    engine = xds.initialize(model, config)
    try:
        engine.backward(engine(torch.arange(18).view(2, 9)))
    except xds.UsageError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize("std", [0.02, 1e-4, 0.0])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "fp16", "autocast"])
def test_a_small_difference_is_found_in_every_precision(precision: str, std: float) -> None:
    for text in run_ranks(first_forward, 2, precision, std, False):
        assert "blocks.0 computes something else in 2 slices" in text
    assert run_ranks(first_forward, 2, precision, std, True) == ["", ""]


def compiled_with_inputs_on_the_host(axis: str) -> list[float]:
    """Losses of two engines: the second one has other groups."""
    losses = []
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "compile": {"enabled": True, "backend": "aot_eager"},
        "activation_checkpointing": {"enabled": True, "cpu_checkpointing": True},
        **(
            {"tensor_parallel": {"tp_size": 2}}
            if axis == "tensor"
            else {"sequence_parallel_size": 2}
        ),
    }
    ids = torch.randint(3, 61, (2, 8), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        engine = xds.initialize(llama(), config)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        engine.destroy()
    return losses


@pytest.mark.parametrize("axis", [pytest.param("tensor", marks=pytest.mark.slow), "sequence"])
def test_compiled_blocks_are_recomputed_by_the_same_graph(axis: str) -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    for first, second in run_ranks(compiled_with_inputs_on_the_host, 2, axis):
        assert first == pytest.approx(second, rel=1e-6)


class Needs16Bits(Block):
    """As with kernels that take 16 bits alone."""

    is_found = False  # the plan

    def forward(self, x: Tensor) -> Tensor:
        if self.is_found and x.dtype is not torch.bfloat16:
            raise RuntimeError("only bf16")
        return super().forward(x)


def in_16_bits_alone(is_right: bool) -> str:
    model = Net(std=0.02, is_right=is_right)
    for block in model.blocks:
        block.__class__ = Needs16Bits
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "tensor_parallel": {"tp_size": 2},
    }
    engine = xds.initialize(model, config)
    Needs16Bits.is_found = True
    try:
        engine(torch.arange(18).view(2, 9))
    except xds.UsageError as error:
        return str(error)
    finally:
        Needs16Bits.is_found = False
        engine.destroy()
    return ""


def test_a_block_that_needs_16_bits_is_proven_in_them() -> None:
    assert run_ranks(in_16_bits_alone, 2, True) == ["", ""]
    assert all("something else" in text for text in run_ranks(in_16_bits_alone, 2, False))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=32))


def step_of(stage: int, how: str, size: int) -> tuple[float, Tensor, Tensor]:
    """The loss, and two weights after a step of SGD: `up`, and the norm before it."""
    model = llama()
    layer: Any = model.get_submodule("model.layers.0")
    up, norm = layer.mlp.up_proj.weight, layer.post_attention_layernorm.weight
    if how == "hook before":
        up.register_hook(lambda grad: grad * 0.5)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"tp_size": size},
    }
    engine = xds.initialize(model, config)
    if how == "hook after":
        up.register_hook(lambda grad: grad * 0.5)
    elif how == "freeze":
        norm.requires_grad_(False)
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    found = [xds.zero.get_full_param(param) for param in (up, norm)]
    engine.destroy()
    return loss.item(), found[0], found[1]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("how", ["hook before", "hook after", "freeze"])
def test_hooks_and_frozen_parameters_are_those_of_the_script(how: str, stage: int) -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    ((loss, up, norm),) = run_ranks(step_of, 1, stage, how, 1)
    for found in run_ranks(step_of, 2, stage, how, 2):
        assert found[0] == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(found[1], up, rtol=0, atol=1e-6)
        torch.testing.assert_close(found[2], norm, rtol=0, atol=1e-6)


def qwen3_in_fp64() -> float:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7058)
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True)).double()
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    wanted = model(input_ids=ids, labels=ids).loss.item()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "tensor_parallel": {"tp_size": 2},
    }
    engine = xds.initialize(model, config)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return loss.item() - wanted


def test_fp64_with_norms_in_fp32_is_not_refused() -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    assert run_ranks(qwen3_in_fp64, 2) == pytest.approx([0, 0], abs=1e-5)
