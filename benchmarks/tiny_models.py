"""Tiny models of every class of transformers, from the rules that make their configs small."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCAB = 71
SECONDS, MAX_LINE_BYTES = 120, 1000

# sizes by the name of the key, the first pattern that fits
SIZES: tuple[tuple[str, Any], ...] = (
    (r".*_token_(id|index)", 3),
    (r"(decoder_)?vocab_size|unpadded_vocab_size|vocab_size_per_layer_input", VOCAB),
    (r"codebook_size", 64),
    (
        r"(conf_)?num_(hidden|decoder|encoder)?_?layers|n_layers?|(en|de)coder_layers|num_blocks|depth",
        2,
    ),
    (r"num_(key_value|kv)_heads|kv_n_heads|swa_num_key_value_heads", 2),
    (r"mamba_n(um)?_heads", 8),
    (r".*(num_|n_|_)heads|n_head|num_query_groups|n_mamba_heads", 4),
    (r"(hidden_size|d_model|n_embd|embedding_dim|emb_dim|embedding_size|word_embed_proj_dim)", 32),
    (r"(input|output)_embedding_size|hidden_size_global|attention_hidden_size|lru_width", 32),
    (r"head_dim|swa_head_dim|qk_nope_head_dim|v_head_dim|dim_head|d_kv|kv_channels", 8),
    (r"qk_rope_head_dim|linear_(key|value)_head_dim|linear_head_dim|attention_head_(dim|size)", 8),
    (r"d_head|index_head_dim|mamba_d_head|mamba_head_dim|mamba_headdim|global_head_dim", 8),
    (r"qk_head_dim", 16),
    (r"rotary_dim", 4),
    (r"index_n_heads", 4),
    (r"index_topk.*", 64),  # beyond it ties are broken by the place in a row
    (
        r".*(intermediate_size.*|ffn_dim|ffn_hidden_size)|d_inner|dff|d_ff|dim_ff|feed_forward_size",
        48,
    ),
    (
        r"kv_lora_rank|q_lora_rank|o_lora_rank|laurel_rank|adapter_rank|hc_lowrank|gated_norm_rank",
        8,
    ),
    (r"(num_|n_routed_|moe_num_|num_local_|n_)experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"(mamba_d_state|state_size|ssm_state_size|time_step_rank|mamba_dt_rank|d_rel)", 4),
    (
        r"(max_position_embeddings|n_positions|n_ctx|model_max_length|max_seq_len|context_length)",
        64,
    ),
    (r"max_(target|source)_positions|original_max_position_embeddings", 64),
    (r"(mamba_)?chunk_size", 4),
    (r"sliding_window(_size)?|window_size|local_attention|attention_window_size", 6),
    (r"(local|lsh)_attn_chunk_length", 4),
    (r"(first_k_dense_replace|num_dense_layers)", 1),
    (r"hidden_size_per_layer_input|ple_embed_dim|hc_mult|hc_count", 4),
    (r"num_kv_shared_layers|num_nextn_predict_layers", 0),
    (r"ngram_vocab_size_base", 64),
    (r"split_ngram_parts|make_ngram_vocab_size_divisible_by", 1),
)


# special tokens in the vocabulary
TOKENS = {
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"sep_token_id": 2, "cls_token_id": 1, "forced_eos_token_id": 2, "eod_token_id": 2},
}


def tiny(kind: Any) -> dict[str, Any]:
    """Arguments of a config class that make the model small. Everything else is as it comes."""
    default = kind()
    values = default.to_dict()
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in kind.sub_configs:
            if getattr(default, name, None) is not None:
                found[name] = tiny(type(getattr(default, name)))
        elif not isinstance(getattr(kind, name, None), property) and type(value) in (int, float):
            found[name] = size_of(name, value)
    if values.get("num_key_value_heads", 0) == values.get("num_attention_heads"):
        found["num_key_value_heads"] = 4
    if isinstance(values.get("layer_types"), list):
        found |= layers(values["layer_types"])
    return found | {name: TOKENS[name] for name in TOKENS if name in values}


def size_of(name: str, value: float) -> float:
    """The value for a tiny model."""
    if re.search(r"dropout|pdrop|layerdrop|jitter", name):
        return type(value)(0)
    size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
    return value if size is None or value <= 0 else min(size, value)


def layers(types: list[str]) -> dict[str, Any]:
    """One layer of each type, and at least two."""
    kept = list(dict.fromkeys(types))
    kept += kept[-1:] if len(kept) == 1 else []
    return {"layer_types": kept, "num_hidden_layers": len(kept)}


# what no rule gives
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "moshi": {"codebook_size": 64, "audio_vocab_size": 64},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {"indexer_budget": 16, "indexer_compress_ratio": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "lsh_attn_chunk_length": 64,
        "local_attn_chunk_length": 64,
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        **{"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1},
        **{"attention_hidden_size": 64, "attention_head_dim": 16},
    },
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8},
        **{"attention_hidden_size": 64, "attention_head_dim": 16},
    },
}


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`values` with `changes`, where both have a dictionary also in its keys."""
    both = {key: values[key] for key in changes if isinstance(values.get(key), dict)}
    return values | changes | {key: merged(both[key], changes[key]) for key in both}


def build(name: str, classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING, **changes: Any) -> nn.Module:
    """The model of `classes` with that config, in training mode. changes: keys of its config."""
    torch.manual_seed(0)
    kind = CONFIG_MAPPING[name]
    config = kind(**merged(tiny(kind) | OVERRIDES.get(name, {}), changes))
    model_class = classes[kind]
    if not isinstance(config, model_class.config_class):  # the language model of several parts
        parts = [getattr(config, part) for part in kind.sub_configs]
        wanted = [part for part in parts if isinstance(part, model_class.config_class)]
        config = wanted[0] if wanted else config
    model = model_class(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1 and param.requires_grad:
                param.add_(torch.randn_like(param) * 0.1)
    return model.train()


def in_fork(compare: Callable[[str], str], name: str) -> str:
    """`compare(name)` in a process of its own, on one line. It ends with a limit of time."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        signal.alarm(SECONDS)
        try:
            text = compare(name)
        except Exception as error:
            text = f"FAILS: {type(error).__name__}: {error}"
        os.write(writes, " ".join(text.split()).encode()[:MAX_LINE_BYTES])
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as file:
        text = file.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return text or f"FAILS: ended with status {status}"


def run_families(
    doc: str | None,
    names: Iterable[str],
    compare: Callable[[str], str],
    shared: Iterable[str],
    page: Callable[[dict[str, str]], str],
    is_known: Callable[[str], bool],
) -> int:
    """The command line of a script that compares many models, each in a fork; 1 where a result is unknown.

    Args:
        doc: of the script. names: of all models. compare: what became of one model, in words.
        shared: modules that all forks need, imported once.
        page: the guide's page of the results by name.
        is_known: the model is equal, or refused, or cannot be tried.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--read", nargs="*", type=Path, help="what earlier calls have printed")
    parser.add_argument("--write", type=Path, help="the page of the guide")
    options = parser.parse_args()
    results = {}
    if options.read:
        lines = [line for file in options.read for line in file.read_text().splitlines()]
        results = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    else:
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        build("mixtral")
        for module in shared:
            importlib.import_module(module)
        for name in options.only or names:
            results[name] = in_fork(compare, name)
            print(f"{name:45s} {results[name]}", flush=True)
    if options.write:
        options.write.write_text(page(results))
    wrong = [name for name, text in results.items() if not is_known(text)]
    print(
        f"{len(results)} models, neither equal nor refused: {', '.join(wrong) or 'none'}",
        file=sys.stderr,
    )
    return bool(wrong)
