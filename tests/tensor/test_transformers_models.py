"""Models of transformers in slices: each is built, proven, and computes the loss and norm of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import nn

import xds

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

VOCAB = 61
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4}  # names of sizes in older models
WIDE_HEADS = {"head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "arcee": {},
    "bloom": OLD,
    "codegen": OLD | {"rotary_dim": 4},
    "cohere": {},
    "ernie4_5": {},
    "exaone4": WIDE_HEADS,
    "falcon": {},
    "gemma": WIDE_HEADS,
    "gemma2": WIDE_HEADS,
    "gemma3_text": WIDE_HEADS,
    "glm": WIDE_HEADS,
    "glm4": WIDE_HEADS,
    "gpt2": OLD | {"n_positions": 32},
    "gpt_bigcode": OLD,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gptj": OLD | {"rotary_dim": 4},
    "granite": {},
    "helium": WIDE_HEADS,
    "llama": {},
    "mistral": {},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "opt": {"ffn_dim": 56, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": WIDE_HEADS,
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}


def build(name: str) -> nn.Module:
    """Two blocks with four heads, two of keys and values where the model has these, and no dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(name, **(sizes | heads | tokens | MODELS[name]))
    torch.manual_seed(7)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, float) and ("drop" in key or isinstance(module, nn.Dropout)):
                setattr(module, key, 0.0)
    return model


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def difference(name: str, tensor: int, cut: bool) -> float:
    """The largest relative difference of loss and norm from a model in one process."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "tensor_parallel": {"tp_size": tensor, "vocab_parallel_lm_head": cut},
    }
    engine = xds.initialize(build(name), config)
    loss = engine(**batch()).loss
    engine.backward(loss)
    engine.step()
    found = (loss.item(), engine.get_global_grad_norm())
    engine.destroy()
    whole = build(name)
    loss = whole(**batch()).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), float("inf"))
    wanted = (loss.item(), norm.item())
    return max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow
def test_models_of_transformers_in_slices_equal_one_process() -> None:
    from transformers import CONFIG_MAPPING

    known = [name for name in MODELS if name in CONFIG_MAPPING]
    ways = [(2, True), (3, False), (4, True)]  # each model takes one of them
    far = {}
    for number, name in enumerate(known):
        tensor, cut = ways[number % len(ways)]
        far[name] = max(run_ranks(difference, tensor, name, tensor, cut))
    assert known and {name: found for name, found in far.items() if found > 1e-6} == {}
