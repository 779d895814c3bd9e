"""MACs of transformers' GPT-2, Llama, ViT and Mixtral equal their closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xds.engine.profiling.recorder import Recorder

BATCH, LENGTH, VOCAB = 2, 24, 96
TEXT = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def _both(linear: int, attention: int, *, without_input_grad: int = 0) -> tuple[int, int]:
    """MACs of forward and of backward, which has two products for each; fused attention has five for two.

    without_input_grad: MACs of layers that read the data, which has no gradient.
    """
    return linear + attention, 2 * linear - without_input_grad + 5 * attention // 2


def gpt2_macs(config: Any) -> tuple[int, int]:
    T, H, L = BATCH * LENGTH, config.n_embd, config.n_layer
    return _both(L * T * 12 * H * H + T * H * VOCAB, L * T * LENGTH * 2 * H)


def llama_macs(config: Any) -> tuple[int, int]:
    """Grouped keys and SwiGLU; in Mixtral a token goes through `num_experts_per_tok` experts."""
    T, H, L = BATCH * LENGTH, config.hidden_size, config.num_hidden_layers
    width = H // config.num_attention_heads
    queries, keys = width * config.num_attention_heads, width * config.num_key_value_heads
    mlps = getattr(config, "num_experts_per_tok", 1)
    router = getattr(config, "num_local_experts", 0)
    layer = 2 * H * queries + 2 * H * keys + H * router + mlps * 3 * H * config.intermediate_size
    return _both(L * T * layer + T * H * VOCAB, L * T * LENGTH * 2 * queries)


def vit_macs(config: Any, labels: int) -> tuple[int, int]:
    H, L, F = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    patches = (config.image_size // config.patch_size) ** 2
    S = patches + 1  # and the class token
    cut = BATCH * patches * H * config.num_channels * config.patch_size**2
    linear = cut + L * BATCH * S * (4 * H * H + 2 * H * F) + BATCH * H * labels
    return _both(linear, L * BATCH * S * S * 2 * H, without_input_grad=cut)


def build(name: str) -> tuple[Any, dict[str, Any], Any]:
    """A model, a batch, its MACs of forward and of backward."""
    import transformers as hf

    ids = torch.randint(3, VOCAB, (BATCH, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    if name == "gpt2":
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        gpt2 = hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, **TEXT, **none)
        return hf.GPT2LMHeadModel(gpt2), batch, gpt2_macs(gpt2)
    if name == "llama":
        llama = hf.LlamaConfig(**TEXT, **LLAMA)
        return hf.LlamaForCausalLM(llama), batch, llama_macs(llama)
    if name.startswith("mixtral"):
        mixtral = hf.MixtralConfig(num_local_experts=4, **TEXT, **LLAMA)
        model = hf.MixtralForCausalLM(mixtral)
        model.set_experts_implementation(name.partition(" ")[2])
        return model, batch, llama_macs(mixtral)
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    shape = {key: LLAMA[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    vit = hf.ViTConfig(
        num_attention_heads=2, image_size=32, patch_size=8, num_labels=5, **shape, **none
    )
    images = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return hf.ViTForImageClassification(vit), images, vit_macs(vit, 5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "mixtral grouped_mm", "mixtral eager"])
def test_a_model_counts_its_closed_form(name: str) -> None:
    model, batch, wanted = build(name)
    recorder = Recorder(model)
    with recorder.forward():
        loss = model(**batch).loss
    with recorder.backward():
        loss.backward()
    found = recorder.profile()
    assert found.backward is not None and (found.macs, found.backward.macs) == wanted
    assert found.flops == 2 * found.macs
    assert found.params == sum(param.numel() for param in model.parameters())
