"""Test helper: trains a small model with each pair of features, and writes the page of what came of it.

PYTHONPATH=tests python tests/feature_pairs.py > docs/combinations.md        (needs transformers; minutes)
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from helpers import run_processes, run_ranks
from pipeline_runs import worst
from tensor_cases import ADAMW, COUNT, LENGTH, SAMPLES, STEPS, VOCAB, batches, build, one_process
from torch import Tensor

import xds
from xds.engine.data.analyzer import Metric, analyze

PARAM = {"stage": 3, "stage3_param_persistence_threshold": 0}
FEATURES: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"zero_optimization": {"stage": 1}},
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "ZeRO 3": {"zero_optimization": PARAM},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "fp32 modules": {
        "bf16": {"enabled": True},
        "data_types": {"keep_in_fp32_modules": ["norm", "v_proj|mlp.gate.weight", "lm_head"]},
    },
    "pipeline": {"pipeline": {"stages": 2}},
    "zero-bubble": {"pipeline": {"stages": 2, "schedule": "zero_bubble"}},
    "tensor": {"tensor_parallel": {"tp_size": 2}},
    "sequence": {"sequence_parallel_size": 2},
    "tiles": {"sequence": {"tiled_mlp": 5, "tiled_loss": 7}},
    "recompute": {"activation_checkpointing": {"enabled": True}},
    "compile": {"compile": {"enabled": True, "backend": "aot_eager"}},
    "offload_optimizer": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "offload_param": {"zero_optimization": {**PARAM, "offload_param": {"device": "cpu"}}},
    "NVMe": {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "FOLDER"}}},
    "1-bit Adam": {
        "optimizer": {"type": "OneBitAdam", "params": {**ADAMW, "freeze_step": 3}},
        "zero_optimization": {"stage": 1},
    },
    "qwZ": {"zero_optimization": {**PARAM, "zero_quantized_weights": True}},
    "qgZ": {"zero_optimization": {"stage": 1, "zero_quantized_gradients": True}},
    "hpZ": {"zero_optimization": {**PARAM, "zero_hpz_partition_size": 2}},
    "shared": {"zero_optimization": {"stage": 1, "shared_parameters": True}},
    "MiCS": {"zero_optimization": {"stage": 1, "mics_shard_size": 2}},
    "layer drop": {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 1.0}},
    "sparse": {"sparse_attention": {"mode": "fixed", "block": 4, "num_local_blocks": 2}},
    "8-bit weights": {
        "compression_training": {
            "weight_quantization": {
                "shared_parameters": {"enabled": True, "quantize_weight_in_forward": True},
                "different_groups": {
                    "all": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["self_attn"]}
                },
            }
        }
    },
    "float8": {"float8": {"enabled": True, "filter": ["self_attn"]}},
    "packing": {"data_packing": {"tokens": LENGTH}},
    "curriculum": {
        "data_efficiency": {
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {
                    "enabled": True,
                    "curriculum_metrics": {
                        "first": {
                            "index_to_sample_path": "FOLDER/first/first_index_to_sample",
                            "index_to_metric_path": "FOLDER/first/first_index_to_metric",
                            "difficulty_type": "value",
                            "clustering_type": "schedule_based",
                            "min_difficulty": 30,
                            "max_difficulty": VOCAB,
                            "schedule_type": "fixed_linear",
                            "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 1},
                        }
                    },
                },
            }
        }
    },
    "token drop": {
        "data_efficiency": {
            "enabled": True,
            "data_routing": {
                "enabled": True,
                "random_ltd": {
                    "enabled": True,
                    "total_layer_num": 4,
                    "random_ltd_layer_num": 2,
                    "random_ltd_layer_id": [1, 2],
                    "model_mask_name": "attention_mask",
                    "model_type": "decoder",
                    "hidden_state_order": "batch_seq_dim",
                    "random_ltd_schedule": {
                        "min_value": 8,
                        "max_value": 12,
                        "schedule_type": "fixed_linear",
                        "schedule_config": {"require_steps": 4, "seq_per_step": 2},
                    },
                },
            },
        }
    },
    "experts": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "outer": {  # with one group the numbers stay
        "outer": {
            "groups": 1,
            "steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.0}},
        }
    },
    "exact means": {},
    "generation": {},
    "inference": {},
}
CALLS = {  # features that are calls, not keys
    "exact means": "`engine.backward(loss, weight=n)`",
    "generation": "`engine.generate(tokens)` between two steps",
    "inference": "`engine.weights().save(folder)`, then `xds.init_inference(model, checkpoint=folder)`",
}
SHOWN = {  # settings that are too long for a row, or have its sign
    "fp32 modules": '`"bf16": {"enabled": true}, "data_types": {"keep_in_fp32_modules": ["norm", "lm_head"]}`',
    "curriculum": "`data_efficiency.data_sampling.curriculum_learning`, with one metric",
    "token drop": "`data_efficiency.data_routing.random_ltd`, in two layers",
    **CALLS,
}
# other computations: the reference has them as well, on one rank at stage 0
CHANGING = (
    "layer drop",
    "sparse",
    "8-bit weights",
    "float8",
    "packing",
    "curriculum",
    "token drop",
)
CHANGING += tuple(CALLS)
# data ranks draw, or scale, differently: the reference has as many
EACH_RANK = ("token drop", "float8")
LOADED = ("packing", "curriculum")  # the engine's own loader reads the samples
EXCLUDE = {
    frozenset(("pipeline", "zero-bubble")),
    frozenset(("bf16", "fp16")),
    frozenset(("fp16", "fp32 modules")),
}
NEAR = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.01, "fp32 modules": 0.05}
NEAR |= {"1-bit Adam": 0.05, "qwZ": 0.01, "qgZ": 0.05}
NEAR |= {"8-bit weights": 1e-3, "float8": 1e-3}  # a value between two codes goes to either


ONLY_HERE = ("stage3_param_persistence_threshold", "initial_scale_power", "backend", "params")
HEAD = """\
# Combinations of features

Any two of these features work together, or are refused before training starts. A test trains a small Llama
for three steps with each pair, and a small Mixtral with each pair of experts, on 2 to 8 ranks: losses and
gradient norms are those of one process without these features, within 1e-5. Where a feature changes the
computation (layer drop, sparse attention, 8-bit weights, float8, packing, curriculum, exact means), the process
has it as well; with 8-bit weights and float8 within 0.1 %. Data ranks drop different tokens and scale their own
inputs, so token drop and float8 are compared with as many data ranks. Generated tokens and the logits of
inference are compared too. In 16 bits losses are compared, within 1 % for fp16, 5 % for bf16, also with fp32
modules. So they are with compressed messages: within 1 % for qwZ, 5 % for qgZ and 1-bit Adam.

| feature | config |
|---|---|"""
MIDDLE = """
- Two ZeRO stages mean the higher one.
- fp32 modules are norms, projections, routers and the head of a model that trains in bf16.
- qwZ, qgZ and hpZ are the parts of ZeRO++: weights in 8 bits, gradients in 4, second shards.
- outer is tried with one group, which meets with itself: its numbers stay. Several groups have those of
  [between-sites.md](between-sites.md).

## Refused

`xds.initialize` raises a `ConfigError` with one of these sentences, or the call raises a `UsageError`. All
other pairs train.
"""


def merged(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """Both, with the values of `two` where they contradict, but the higher ZeRO stage."""
    found = copy.deepcopy(dict(one))
    for key, value in two.items():
        there = found.get(key)
        is_both = isinstance(there, Mapping) and isinstance(value, Mapping)
        found[key] = merged(there, value) if is_both else value  # type: ignore[arg-type]
        if key == "stage":
            found[key] = max(value, one.get(key, 0))
    return found


def config_of(names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": COUNT,
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }
    for name in names:
        found = merged(found, FEATURES[name])
    return found


def ranks_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """World size and data ranks."""
    model_ranks = config.get("pipeline", {}).get("stages", 1)
    model_ranks *= config.get("tensor_parallel", {}).get("tp_size", 1)
    model_ranks *= config.get("sequence_parallel_size", 1)
    data = 2 if model_ranks < 4 else 1
    zero = config.get("zero_optimization", {})
    if zero.get("zero_hpz_partition_size") and model_ranks == 1:
        data = 4
    if zero.get("mics_shard_size"):  # two shard groups of two ranks
        data = 4 // config.get("sequence_parallel_size", 1)
    return model_ranks * data, data


Result = tuple[list[tuple[float, float]], list[float]]  # loss and norm of each step; other numbers


def samples(names: tuple[str, ...]) -> list[dict[str, Tensor]]:
    """What the engine's loader reads. Two samples fill a packed row, so all rows have as many labels."""
    length = LENGTH // 2 if "packing" in names else LENGTH
    draw = torch.Generator().manual_seed(3)
    rows = torch.randint(3, VOCAB, (400, length), generator=draw)
    return [{"input_ids": row, "labels": row} for row in rows]


def model_of(names: tuple[str, ...]) -> str:
    return "mixtral" if "experts" in names else "llama"


def train(
    names: tuple[str, ...], config: dict[str, Any], kind: str, data: int = 0
) -> tuple[Result, str]:
    """On each rank: what came of training; or why it is refused.

    kind: of the model. data: take the samples of such ranks.
    """
    try:
        loaded = samples(names) if {*LOADED} & {*names} else None
        engine = xds.initialize(build(kind), config, training_data=loaded)
        steps, others = [], []
        for step in range(STEPS):
            given: Any = None
            if loaded is None:
                given = batches(kind, step, engine.dp_rank)
            if data and loaded is None:
                given = _joined([batches(kind, step, rank) for rank in range(data)])
            loss = (
                weighted_step(engine, given)
                if "exact means" in names
                else engine.train_batch(given)
            )
            steps.append((float(loss), float(engine.get_global_grad_norm() or 0)))
            if "generation" in names and step == 1:
                prompt = torch.arange(3, 9).view(1, 6)
                tokens = engine.generate(prompt, max_new_tokens=4, do_sample=False)
                others += tokens.flatten().tolist()
        if "inference" in names:
            others += inferred(engine, kind)
        engine.destroy()
    except xds.XdsError as error:
        return ([], []), str(error)
    return (steps, others), ""


def weighted_step(engine: xds.Engine, given: Iterator[Any] | None) -> float:
    """A step whose micro-batches have different numbers of labels."""
    given = iter(engine.training_dataloader) if given is None else given
    for number in range(COUNT):
        batch = next(given)
        labels = batch["labels"].clone()
        labels[:, : 1 + number] = -100
        loss = engine(**{**batch, "labels": labels}).loss
        engine.backward(loss, weight=(labels[:, 1:] != -100).sum())
        engine.step()
    return engine.mean_loss()


def inferred(engine: xds.Engine, kind: str) -> list[float]:
    """Logits of a model that generates, with the weights of `engine`."""
    folder = Path(engine.config.report_folder) / "weights"
    engine.weights().save(folder)
    dist.barrier()
    made = xds.init_inference(build(kind), dtype=torch.float32, checkpoint=str(folder))
    with torch.no_grad():
        logits = made(torch.arange(3, 9).view(1, 6)).logits
    dist.barrier()
    return [float(value) for value in logits[0, -1, :4]]


def _joined(of_ranks: list[Iterator[dict[str, Tensor]]]) -> Iterator[dict[str, Tensor]]:
    """Micro-batches with the samples of all ranks."""
    for parts in zip(*of_ranks, strict=True):
        yield {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def reference(names: tuple[str, ...], data: int, folder: str, kind: str) -> Result:
    """The result of one rank, whose micro-batches have the samples of all `data` ranks.

    With a feature whose data ranks draw differently, that of as many ranks at stage 0.
    """
    config = {**in_folder(config_of(names), folder), "report_folder": folder}
    if {*EACH_RANK} & {*names}:
        result, refusal = run_ranks(train, data, names, config, kind, small_numel=None)[0]
    else:
        config = {**config, "train_micro_batch_size_per_gpu": SAMPLES * data}
        result, refusal = run_ranks(train, 1, names, config, kind, data, small_numel=None)[0]
    assert not refusal, refusal
    return result


def in_folder(config: Any, folder: str) -> Any:
    """`config` with `folder` in the place of FOLDER."""
    return json.loads(json.dumps(config).replace("FOLDER", folder))


def outcome(names: tuple[str, ...]) -> str:
    """ "" if training is equal to one process in fp32; else why it is refused, or what is wrong."""
    changing = tuple(name for name in names if name in CHANGING)
    with tempfile.TemporaryDirectory() as folder:
        if "curriculum" in names:
            analyze(samples(names), [Metric("first", first_token)], folder)
        config = in_folder(config_of(names), folder)
        config["report_folder"] = folder
        world_size, data = ranks_of(config)
        # memory that ranks share, and the compiler, are of a process
        run = run_processes if {"shared", "compile"} & {*names} else run_ranks
        kind = model_of(names)
        (steps, others), refusal = run(train, world_size, names, config, kind, small_numel=None)[0]
        if refusal:
            return refusal.removeprefix("config: ")
        wanted: Any = one_process(kind, data)
        expected: list[float] = []
        if changing:
            wanted, expected = reference(changing, data, folder, kind)
    near = max(NEAR[name] for name in ("fp32", *names) if name in NEAR)
    if near > NEAR["fp32"]:  # norms of 16 bits are far less exact than losses
        steps, wanted = ([(loss, 1.0) for loss, _ in each] for each in (steps, wanted))
    found = worst(steps, wanted)
    if expected and near == NEAR["fp32"]:
        found = max(found, *(abs(a - b) for a, b in zip(others, expected, strict=True)))
    return "" if found <= near else f"WRONG by {found:.0e}"


def first_token(rows: list[Any]) -> Any:
    return np.array([int(row["input_ids"][0]) for row in rows])


def pairs() -> list[tuple[str, str]]:
    return [pair for pair in combinations(FEATURES, 2) if frozenset(pair) not in EXCLUDE]


def problems(refusal: str) -> list[str]:
    """The sentences of a refusal, which may have several."""
    return sorted(
        re.sub(r"^  - ", "", line) for line in re.sub(r"^\d+ problems\n", "", refusal).splitlines()
    )


def shown(setting: Any) -> Any:
    """A setting as the page has it: without what only a small model needs."""
    if not isinstance(setting, Mapping):
        return setting
    return {key: shown(value) for key, value in setting.items() if key not in ONLY_HERE}


def keys_of(setting: Mapping[str, Any]) -> str:
    return f"`{json.dumps(shown(setting))[1:-1]}`"


def page(found: Mapping[tuple[str, str], str]) -> str:
    """The page, of the outcome of every pair."""
    reasons: dict[str, list[str]] = {}
    for pair, refusal in found.items():
        for sentence in problems(refusal):
            reasons.setdefault(sentence, []).append(" + ".join(pair))
    rows = [
        f"| {name} | {SHOWN.get(name) or keys_of(setting)} |" for name, setting in FEATURES.items()
    ]
    refused = [f"- **{', '.join(names)}**. {reason}" for reason, names in reasons.items()]
    return "\n".join([HEAD, *rows, MIDDLE, *refused]) + "\n"


def cells(text: str) -> dict[tuple[str, str], list[str]]:
    """What the page `text` says about each pair: the sentences of its refusal, none where it trains."""
    found: dict[tuple[str, str], list[str]] = {pair: [] for pair in pairs()}
    for names, reason in re.findall(r"^- \*\*(.*?)\*\*\. (.*)$", text, re.MULTILINE):
        for name in names.split(", "):
            one, two = name.split(" + ")
            found[one, two].append(reason)
    return {pair: sorted(sentences) for pair, sentences in found.items()}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.write(page({pair: outcome(pair) for pair in pairs()}))
