"""Every model of transformers with experts: experts on two ranks train as one process, or are refused.

    python benchmarks/experts/families.py [--only CLASS ...] > results.txt
    python benchmarks/experts/families.py --read results.txt --write docs/experts-models.md

Each class with experts that generates text is built tiny, with the cache, the attention and the auxiliary loss
of its config. It takes three steps of plain SGD on two ranks that share the experts: at stage 2 with its own
implementation of experts, and at stage 3 with the loop ("eager"). "Equal" are losses and norms that differ from
those of one process by at most 1e-6, and parameters that moved as there. What differs in fp32 is tried in
double precision, where an error stays and rounding does not. Dropout is off, because random numbers differ.
Each model runs in a fork with a limit of time. The script ends with 1 where one is neither equal nor refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from helpers import run_ranks  # noqa: E402
from tiny_models import VOCAB, build, run_families  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

import xds  # noqa: E402
from xds.experts.config import ExpertParallel  # noqa: E402
from xds.experts.cut import find_experts  # noqa: E402

STEPS, RANKS, LEARNING_RATE = 3, 2, 0.1
NEAR = 1e-6  # relative, of losses and norms
# of parameters: parts of the largest change of the tensor, and of its largest value
NEAR_CHANGE, NEAR_VALUE = 1e-3, 1e-6
# stage, autoep_size, implementation of experts; None: the model's own
RUNS: tuple[tuple[int, int | str, str | None], ...] = ((2, RANKS, None), (3, "auto", "eager"))
KINDS = ("CAUSAL_LM", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")
SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
DOTS = {"per_layer_config": {}, "head_dim": 16, "num_key_value_heads": 4}
DOTS_VISION = {"pyramid_num_routed": [4, 8], "adapter_in_dim": 32, "adapter_out_dim": 32}
DOTS_AUDIO = {"adapter_input_size": 32, "adapter_out_dim": 32}
GEMMA = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
INDEXER = {
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8},
    **{"indexer_budget": 16, "indexer_compress_ratio": 4},
}
# what switches experts on, and what no rule of tiny models gives
CHANGES: dict[str, dict[str, Any]] = {
    "beam": SPARSE,
    "deepseek_ocr2": {"text_config": {**SPARSE, "num_experts_per_tok": 2}},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
    "diffusion_gemma": {"text_config": GEMMA},
    "doge": {"is_moe": True},
    "dots3_note": {"text_config": DOTS, "vision_config": DOTS_VISION, "audio_config": DOTS_AUDIO},
    "dots3_note_text": DOTS,
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 1e4},
                "mrope_section": [1, 1, 2],
            }
        }
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"text_config": {"enable_moe_block": True, **GEMMA}},
    "gemma4_text": {"enable_moe_block": True, **GEMMA},
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
                "mrope_section": [2, 1, 1],
            }
        }
    },
    "glm5_next": {"text_config": SPARSE},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "mistral4": {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "head_dim": 16},
    "muse_spark": {
        "audio_config": {
            **{"patch_sizes": [4, 4], "hidden_sizes": [32, 32], "depths": [1, 1]},
            "out_hidden_size": 32,
        }
    },
    "nemo_speechlm": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "nllb-moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "qwen3_omni_moe": {"talker_config": {"text_config": {"shared_expert_intermediate_size": 48}}},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "step3p7": {"text_config": {**SPARSE, "sliding_window": 6}},
    "switch_transformers": {"decoder_start_token_id": 0},
}
Classes = dict[
    str, tuple[str, Any]
]  # name of a class -> its name in AutoConfig, the table of classes
Curve = list[tuple[float, float]]  # loss and norm of each step


def classes_with_experts() -> Classes:
    """The classes whose config has a key of experts."""
    result: Classes = {}
    for kind in KINDS:
        table = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING")
        for name, config in CONFIG_MAPPING.items():
            if config in table and has_experts(config):
                result.setdefault(table[config].__name__, (name, table))
    return result


def has_experts(kind: Any) -> bool:
    try:
        values = kind().to_dict()
    except Exception:  # a config without defaults: its class decides
        values = dict.fromkeys(kind.__annotations__)
    return any(re.search("expert|moe", key) for key in keys(values))


def keys(values: dict[Any, Any]) -> Iterator[str]:
    for key, value in values.items():
        yield str(key)
        if isinstance(value, dict):
            yield from keys(value)


def model_of(
    name: str, table: Any, implementation: str | None = None, dtype: torch.dtype = torch.float32
) -> Any:
    """The tiny model, with its auxiliary loss."""
    model: Any = build(name, table, **CHANGES.get(name, {}))
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = True
    if implementation is not None or dtype is torch.float64:  # the others have no double precision
        model.set_experts_implementation("eager")
    return model.to(dtype)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(4, VOCAB - 1, (2, 9), generator=generator)


def alone(model: nn.Module) -> Curve:
    """Train `model` in one process on the batches of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    curve = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(RANKS):
            ids = batch(step, rank)
            loss = model(input_ids=ids, labels=ids).loss / RANKS
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
        optimizer.step()
        optimizer.zero_grad()
        curve.append((total, norm))
    return curve


def on_rank(
    name: str,
    table: Any,
    dtype: torch.dtype,
    stage: int,
    size: int | str,
    implementation: str | None,
) -> tuple[Curve, dict[str, Tensor]] | str:
    """The losses, norms and whole parameters of this rank; or the sentence that refuses."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": stage},
        "expert_parallel": {"enabled": True, "autoep_size": size},
    }
    curve = []
    try:
        engine = xds.initialize(model_of(name, table, implementation, dtype), config)
        for step in range(STEPS):
            ids = batch(step, dist.get_rank())
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            curve.append((loss.item(), engine.get_global_grad_norm()))
    except xds.UsageError as error:
        return str(error)
    params = engine.state_dict()
    engine.destroy()
    return curve, params


def compare(class_name: str) -> str:
    """What became of one model, in words."""
    name, table = classes_with_experts()[class_name]
    try:
        model = model_of(name, table)
    except Exception as error:
        return f"not built: {type(error).__name__}: {error}"
    if not any(re.search("Expert|Moe|MoE|SparseMLP", type(m).__name__) for m in model.modules()):
        return "no experts: those of its config are off"
    layers = len(find_experts(model, ExpertParallel()))
    try:
        alone(model)
    except Exception as error:
        return f"does not train alone: {type(error).__name__}: {error}"
    text, far = apart(name, table, torch.float32)
    if not text:
        return f"equal: {layers} layers, losses and norms by {far:.0e}"
    if text.startswith("refused"):
        return text
    # rounding may grow in three steps: an error does not become smaller with it
    why, double_far = apart(name, table, torch.float64)
    if why:
        return f"DIFFERS: {text}; in double precision: {why}"
    return f"equal: {layers} layers, losses and norms by {double_far:.0e} in double precision"


def apart(name: str, table: Any, dtype: torch.dtype) -> tuple[str, float]:
    """How ranks differ from one process, in words, and the largest relative difference of losses and norms."""
    model = model_of(name, table, None, dtype)
    before = {key: value.detach().clone() for key, value in model.state_dict().items()}
    wanted, most = alone(model), 0.0
    for run in RUNS:
        results = run_ranks(on_rank, RANKS, name, table, dtype, *run)
        if any(isinstance(result, str) for result in results):
            is_same = len(set(map(str, results))) == 1
            return (f"refused: {results[0]}" if is_same else f"some ranks refuse: {results}"), 0.0
        text, far = far_apart(wanted, [curve for curve, _ in results])
        text = text or moved_apart(before, model.state_dict(), [params for _, params in results])
        most = max(most, far)
        if text:
            return f"at stage {run[0]}: {text}", most
    return "", most


def far_apart(wanted: Curve, curves: list[Curve]) -> tuple[str, float]:
    """The first step of the ranks that differs, in words, and the largest relative difference."""
    most = 0.0
    for step, (loss, norm) in enumerate(wanted):
        mean = sum(curve[step][0] for curve in curves) / len(curves)
        far = max(abs(mean / loss - 1), *(abs(curve[step][1] / norm - 1) for curve in curves))
        most = max(most, far)
        if not far <= NEAR:
            found = f"loss {mean:.7f} and {loss:.7f}, norm {curves[0][step][1]:.6g} and {norm:.6g}"
            return f"step {step}: {found}", most
    return "", most


def moved_apart(
    before: dict[str, Tensor], after: dict[str, Tensor], ranks: list[dict[str, Tensor]]
) -> str:
    """The first parameter of a rank that has not moved as in one process, in words; "": none."""
    for key, value in after.items():
        change = largest(value - before[key])
        allowed = NEAR_CHANGE * change + NEAR_VALUE * largest(value)
        far = max(largest(params[key] - value) for params in ranks)
        if not far <= allowed:
            return f"{key} by {far:.1e} after a change of {change:.1e}"
    return ""


def largest(values: Tensor) -> float:
    return float(values.double().abs().max()) if values.numel() else 0.0


# -- the page -------------------------------------------------------------------------------------------------

HEADINGS = {
    "equal": "Equal to one process",
    "refused": "Refused",
    "not tried": "Not tried",
}

PAGE = """\
# Experts on several ranks: which models

All {count} classes of transformers {version} that generate text and have experts, built tiny, with the cache,
the attention and the auxiliary loss of their configs, on a CPU. Two ranks share the experts of a layer, and
take {steps} steps of SGD at stages 2 and 3. Equal means that losses and norms differ by at most 1e-6 from
those of one process, and that every parameter has moved as there. "In double precision": in fp32 rounding
grows beyond that. `python benchmarks/experts/families.py` tries them again.

- Each training proves its own model: it compares a module of experts with its experts one at a time.
- Models with images or sound are given text alone.
- A model that is refused trains without `expert_parallel`: its experts are then sharded like other weights.
"""


def kind_of(text: str) -> str:
    if text.startswith(("not built", "does not train alone", "no experts")):
        return "not tried"
    return re.split("[: ]", text)[0]


def page(results: dict[str, str]) -> str:
    """The guide's page of all models."""
    lines = [PAGE.format(count=len(results), version=version("transformers"), steps=STEPS)]
    for kind, heading in HEADINGS.items():
        names = sorted(name for name, text in results.items() if kind_of(text) == kind)
        lines += [f"## {heading} ({len(names)})", ""]
        if kind == "equal":
            lines += ["| model | layers of experts | largest difference |", "|---|---|---|"]
            for name in names:
                layers, far = re.findall(r"(\d+) layers.* by (.+)", results[name])[0]
                lines += [f"| `{name}` | {layers} | {far} |"]
        else:
            lines += ["| model | reason |", "|---|---|"]
            lines += [f"| `{name}` | {reason(results[name])} |" for name in names]
        lines += [""]
    return "\n".join(lines)


def reason(text: str) -> str:
    """Without what markdown would read as its own."""
    short = text if text.startswith("no experts") else text.partition(": ")[2]
    if text.startswith("refused"):  # without the setting and the remedy, which are the same for all
        short = short.partition(": ")[2].rpartition("; ")[0]
    return re.sub(r"[|`<>]", "", short)[:300].strip()


def main() -> int:
    names, shared = sorted(classes_with_experts()), ["thread_ranks", "xds.engine.initialize"]
    return run_families(
        __doc__, names, compare, shared, page, lambda text: kind_of(text) in HEADINGS
    )


if __name__ == "__main__":
    sys.exit(main())
