"""Every causal language model of transformers with packed rows: equal to one sample a row, or refused.

    python benchmarks/packing_families.py [--only NAME ...] > results.txt
    python benchmarks/packing_families.py --read results.txt --write docs/packed-models.md

Each class of MODEL_FOR_CAUSAL_LM_MAPPING is built tiny, with the cache and the attention of its config. It
takes a step of plain SGD on packed rows through the engine, and one in plain PyTorch on the same samples, one a
forward. "Equal" is a loss and gradients that differ by at most 1e-5, relative to the loss and to the largest
gradient. Dropout is off, because random numbers differ. Each model runs in a fork with a limit of time. The
script ends with 1 where a model is neither equal nor refused.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import xds

ROW, NEAR = 32, 1e-5
LENGTHS = (9, 7, 12, 8, 15, 5, 11, 6, 13, 10)
SECONDS, MAX_LINE_BYTES = 120, 1000
PADDING, VOCAB = 0, 71

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


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind = CONFIG_MAPPING[name]
    arguments = tiny(kind)
    config = kind(**arguments | OVERRIDES.get(name, {}))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
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


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, VOCAB - 1, (n,), generator=generator) for n in LENGTHS]


def alone(model: nn.Module, data: list[Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one sample a row, with labels shifted here: no model's own rule counts."""
    total, count = torch.zeros(()), 0
    for ids in data:
        logits = model(input_ids=ids[None], labels=ids[None]).logits
        total = total + nn.functional.cross_entropy(
            logits[0, :-1].float(), ids[1:], reduction="sum"
        )
        count += len(ids) - 1
    loss = total / count
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads


def packed(model: nn.Module, data: list[Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of packed rows, by a step of SGD through the engine."""
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "data_packing": {"tokens": ROW, "columns": {"input_ids": PADDING, "labels": -100}},
    }
    engine = xds.initialize(model, config, training_data=data)
    seen: list[Tensor] = []
    total, count = 0.0, 0
    for batch in engine.training_dataloader:
        wanted = batch["labels"][:, 1:]
        logits = engine(**batch).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted.flatten())
        n = int((wanted != -100).sum())
        total, count = total + loss.item() * n, count + n
        engine.backward(loss, weight=n)
        engine.step()
        seen += list(rows_of(batch))
        if engine.global_steps:
            break
    assert sorted(map(tuple, (s.tolist() for s in seen))) == sorted(
        map(tuple, (s.tolist() for s in data))
    ), "the rows of the step are not the samples once"
    after = dict(engine.module.named_parameters())
    return total / count, {name: before[name] - after[name].detach() for name in before}


def rows_of(batch: dict[str, Tensor]) -> Iterator[Tensor]:
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        lengths = positions.eq(0).cumsum(0).unique(return_counts=True)[1].tolist()
        yield from (part for part in ids.split(lengths) if part[0] != PADDING)


def compare(name: str) -> str:
    """What became of one model, in words."""
    try:
        model, data = build(name), samples()
    except Exception as error:
        return f"not built: {type(error).__name__}: {error}"
    try:
        loss, grads = alone(model, data)
    except Exception as error:
        return f"does not train alone: {type(error).__name__}: {error}"
    model.zero_grad()
    attention = getattr(model.config, "_attn_implementation", "")
    try:
        found, found_grads = packed(build(name), data)
    except xds.UsageError as error:
        return f"refused: {error}"
    largest = max(float(grad.abs().max()) for grad in grads.values())
    far = {
        key: float((found_grads[key] - grad).abs().max()) / largest for key, grad in grads.items()
    }
    worst = max(far, key=lambda key: far[key])
    if abs(found - loss) > NEAR * loss or far[worst] > NEAR:
        return f"DIFFERS: loss {found:.6f} and {loss:.6f}, gradient of {worst} by {far[worst]:.1e}"
    return f"equal ({attention}): loss {loss:.4f}, gradients by {far[worst]:.1e}"


def in_fork(name: str) -> str:
    """`compare` in a process of its own, on one line."""
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


# -- the page -------------------------------------------------------------------------------------------------

HEADINGS = {
    "equal": "Equal to one sample a row",
    "refused: see": "Refused: tokens would see other samples",
    "refused: restart": "Refused: positions do not restart",
    "refused: begin": "Refused: positions do not begin at 0",
    "not tried": "Not tried",
}


PAGE = """# Packed rows: which models

All {} causal language models of transformers {}, built tiny, with the cache and the attention of their
configs, on a CPU: a step of SGD on [packed rows](data.md#no-token-sees-another-sample) through the engine,
against plain PyTorch with one sample a forward. Equal means that loss and gradients differ by at most 1e-5.
`python benchmarks/packing_families.py` tries them again.

- Each training proves its own model, with its weights, attention and device. One that is refused here may train
  on a GPU, where its kernels find the samples.
- Models that choose tokens by an index, such as DeepSeek V3.2, are equal for samples of at most `index_topk`
  tokens. In longer ones transformers breaks ties of the index by the place in the row.
"""


def kind_of(text: str) -> str:
    for word in ("see", "restart", "begin"):
        if text.startswith("refused") and f" {word} " in text:
            return f"refused: {word}"
    if text.startswith(("not built", "does not train alone")):
        return "not tried"
    return text.partition(" ")[0]


def page(results: dict[str, str]) -> str:
    """The guide's page of all models."""
    lines = [PAGE.format(len(results), version("transformers"))]
    for kind, heading in HEADINGS.items():
        names = sorted(name for name, text in results.items() if kind_of(text) == kind)
        lines += [f"## {heading} ({len(names)})", ""]
        if kind == "not tried":
            lines += ["| model | reason |", "|---|---|"]
            lines += [f"| `{name}` | {reason(results[name])} |" for name in names]
        else:
            lines += textwrap.wrap(", ".join(f"`{name}`" for name in names) + ".", 120)
        lines += [""]
    return "\n".join(lines)


def reason(text: str) -> str:
    """Without what markdown would read as its own."""
    short = text.partition(": ")[2].partition(". ")[0]
    return re.sub(r"[|`<>]", "", short)[:100].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of models, as in AutoConfig")
    parser.add_argument("--read", nargs="*", type=Path, help="what earlier calls have printed")
    parser.add_argument("--write", type=Path, help="the page of the guide")
    options = parser.parse_args()
    if options.read:
        lines = [line for file in options.read for line in file.read_text().splitlines()]
        results = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    else:
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        build("llama")  # what forks share is imported once
        importlib.import_module("xds.engine.packing.forwards")
        causal = [
            name for name, kind in CONFIG_MAPPING.items() if kind in MODEL_FOR_CAUSAL_LM_MAPPING
        ]
        results = {}
        for name in options.only or causal:
            results[name] = in_fork(name)
            print(f"{name:24s} {results[name]}", flush=True)
    if options.write:
        options.write.write_text(page(results))
    wrong = [name for name, text in results.items() if kind_of(text) not in HEADINGS]
    print(
        f"{len(results)} models, neither equal nor refused: {', '.join(wrong) or 'none'}",
        file=sys.stderr,
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
