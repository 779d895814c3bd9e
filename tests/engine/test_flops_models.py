"""MACs and FLOPs of transformers' GPT-2, Llama, ViT and Mixtral equal their closed forms."""

from __future__ import annotations

from typing import Any

import flops_closed_forms as forms
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


def build(name: str) -> tuple[Any, dict[str, Any], Any]:
    """A model, a batch, its closed form."""
    import transformers as hf

    ids = torch.randint(3, VOCAB, (BATCH, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    if name == "gpt2":
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        gpt2 = hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, **TEXT, **none)
        return hf.GPT2LMHeadModel(gpt2), batch, forms.gpt2(gpt2, BATCH, LENGTH)
    if name == "llama":
        llama = hf.LlamaConfig(**TEXT, **LLAMA)
        return hf.LlamaForCausalLM(llama), batch, forms.llama(llama, BATCH, LENGTH)
    if name.startswith("mixtral"):
        mixtral = hf.MixtralConfig(num_local_experts=4, **TEXT, **LLAMA)
        model = hf.MixtralForCausalLM(mixtral)
        model.set_experts_implementation(name.partition(" ")[2])
        return model, batch, forms.mixtral(mixtral, BATCH, LENGTH)
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    shape = {key: LLAMA[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    vit = hf.ViTConfig(
        num_attention_heads=2, image_size=32, patch_size=8, num_labels=5, **shape, **none
    )
    images = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return hf.ViTForImageClassification(vit), images, forms.vit(vit, BATCH, 5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "mixtral grouped_mm", "mixtral eager"])
def test_a_model_counts_its_closed_form(name: str) -> None:
    model, batch, wanted = build(name)
    recorder = Recorder(model)
    with recorder.forward():
        loss = model(**batch).loss
    with recorder.backward():
        loss.backward()
    found = recorder.profile()
    assert found.macs == wanted.macs
    assert found.backward is not None and found.backward.macs == wanted.backward_macs
    assert found.flops == pytest.approx(wanted.flops, rel=1e-5)  # grouped experts add up offsets
    assert not found.unknown
    assert found.params == sum(param.numel() for param in model.parameters())
