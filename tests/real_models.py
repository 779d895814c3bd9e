"""Test helper: tiny random `transformers` models, their batches, and common additions of users."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, WIDTH, LENGTH, LABELS = 61, 24, 10, 7  # odd sizes: slots and shards need padding
NAMES = ("gpt2", "llama", "mixtral", "t5", "vit", "whisper")
LORA_TARGETS = {
    "gpt2": ["c_attn", "c_proj"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "mixtral": ["q_proj", "v_proj"],
    "t5": ["q", "v", "wo"],
    "vit": ["q_proj", "v_proj"],
    "whisper": ["q_proj", "v_proj"],
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]  # 3-D parameters, not modules
LORA_SAVED = {"gpt2": ["ln_f"], "llama": ["embed_tokens"], "t5": ["final_layer_norm"]}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=WIDTH,
        n_layer=3,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        num_local_experts=24,  # more than a rank's tokens reach: some get no gradient
        num_experts_per_tok=1,
    )
    return MixtralForCausalLM(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=12,
        d_ff=40,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=40,
        image_size=16,
        patch_size=8,
        num_labels=LABELS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_source_positions=16,
        max_target_positions=16,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config)


_MAKERS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mixtral": _mixtral,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
}


def build(name: str, variant: str = "plain") -> Any:
    """A model of `NAMES`, the same values on every call, in training mode.

    Args:
        variant: "plain"; "lora" (peft, base frozen), "lora_saved" (and modules_to_save), "lora_experts" (also
            on stacked experts); "recomputed", "recomputed_reentrant", "lora_recomputed_reentrant"
            (gradient_checkpointing_enable).
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(1234)
    model = _MAKERS[name]()
    if variant.startswith("lora"):
        model = _with_lora(model, name, variant)
    if variant.endswith(("recomputed", "recomputed_reentrant")):
        reentrant = variant.endswith("reentrant")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if variant.startswith("lora"):
            model.enable_input_require_grads()  # what a reentrant checkpoint of a frozen base needs
    return model.train()


def _with_lora(model: nn.Module, name: str, variant: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2,
        lora_alpha=2,
        lora_dropout=0.0,
        target_modules=LORA_TARGETS[name],
        target_parameters=EXPERTS if variant == "lora_experts" else None,
        modules_to_save=LORA_SAVED[name] if variant == "lora_saved" else None,
        init_lora_weights=False,  # both factors random: all of them get gradients from the start
        fan_in_fan_out=name == "gpt2",
    )
    return get_peft_model(model, config)


def batch(name: str, step: int, samples: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    """Keyword arguments of the model for one step, the same on every call; pictures and sound in `dtype`."""
    generator = torch.Generator().manual_seed(77 + step)

    def tokens(length: int = LENGTH) -> Tensor:
        return torch.randint(3, VOCAB, (samples, length), generator=generator)

    if name == "vit":
        pictures = torch.randn(samples, 3, 16, 16, generator=generator)
        labels = torch.randint(0, LABELS, (samples,), generator=generator)
        return {"pixel_values": pictures.to(dtype), "labels": labels}
    if name == "whisper":
        sound = torch.randn(samples, 8, 32, generator=generator)
        return {"input_features": sound.to(dtype), "labels": tokens()}
    if name == "t5":
        return {"input_ids": tokens(), "labels": tokens(6)}
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def part_of(inputs: Any, rank: int, world_size: int) -> Any:
    """The samples of `inputs` that `rank` gets."""
    return {key: value.chunk(world_size)[rank] for key, value in inputs.items()}
