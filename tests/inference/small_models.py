"""Tiny models of transformers, built from configs, for the tests of inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 61
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": {
        **{"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    },
    "opt": {
        **{"hidden_size": 32, "ffn_dim": 56, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"word_embed_proj_dim": 32, "max_position_embeddings": 64},
    },
}


def config_of(name: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    tokens = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1}
    return AutoConfig.for_model(name, vocab_size=VOCAB, **tokens, **{**SIZES[name], **changes})


def build(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """In evaluation mode, with weights that are large enough for logits to differ."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(name, **changes)).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(4)
    return model


def on_meta(name: str, **changes: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(name, **changes)).eval()


def prompt(rows: int = 2, tokens: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(2, VOCAB, (rows, tokens), generator=generator)


def greedy(model: Any, ids: Tensor, new: int = 8, **more: Any) -> Tensor:
    mask = torch.ones_like(ids)
    made: Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **more
    )
    return made
