"""Test helper: trains a small Llama with each pair of features, and writes the page of what came of it.

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
from functools import cache
from itertools import combinations
from typing import Any

import torch
from helpers import run_processes, run_ranks
from pipeline_runs import worst
from tensor_cases import ADAMW, COUNT, SAMPLES, STEPS, batches, build, one_process
from torch import Tensor

import xds

PARAM = {"stage": 3, "stage3_param_persistence_threshold": 0}
FEATURES: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"zero_optimization": {"stage": 1}},
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "ZeRO 3": {"zero_optimization": PARAM},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
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
                    "mlp": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["mlp"]}
                },
            }
        }
    },
}
# other computations: the reference has them as well, on one rank at stage 0
CHANGING = ("layer drop", "sparse", "8-bit weights")
EXCLUDE = {
    frozenset(("pipeline", "zero-bubble")),
    frozenset(("bf16", "fp16")),
}
NEAR = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.01}
NEAR |= {"1-bit Adam": 0.05, "qwZ": 0.01, "qgZ": 0.05}
NEAR |= {"8-bit weights": 1e-3}  # a value between two codes goes to either


ONLY_HERE = ("stage3_param_persistence_threshold", "initial_scale_power", "backend", "params")
HEAD = """\
# Combinations of features

Any two of these features work together, or are refused before training starts. A test trains a small Llama
for three steps with each pair, on 2 to 8 ranks: losses and gradient norms are those of one process without
these features, within 1e-5. Where a feature changes the computation (layer drop, sparse attention, 8-bit
weights), the process has it as well; with 8-bit weights within 0.1 %. In 16 bits losses are compared, within
1 % for fp16 and 5 % for bf16. So they are with compressed messages: within 1 % for qwZ, 5 % for qgZ and 1-bit
Adam.

| feature | config |
|---|---|"""
MIDDLE = """
- Two ZeRO stages mean the higher one.
- qwZ, qgZ and hpZ are the parts of ZeRO++: weights in 8 bits, gradients in 4, second shards.

## Refused

`xds.initialize` raises a `ConfigError` with one of these sentences. All other pairs train.
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


def train(config: dict[str, Any], data: int = 0) -> tuple[list[tuple[float, float]], str]:
    """On each rank: loss and norm of each step; or why it is refused. data: take the samples of such ranks."""
    try:
        engine = xds.initialize(build("llama"), config)
        found = []
        for step in range(STEPS):
            given = batches("llama", step, engine.dp_rank)
            if data:
                given = _joined([batches("llama", step, rank) for rank in range(data)])
            loss = engine.train_batch(given)
            found.append((loss.item(), float(engine.get_global_grad_norm() or 0)))
        engine.destroy()
    except xds.XdsError as error:
        return [], str(error)
    return found, ""


def _joined(of_ranks: list[Iterator[dict[str, Tensor]]]) -> Iterator[dict[str, Tensor]]:
    """Micro-batches with the samples of all ranks."""
    for parts in zip(*of_ranks, strict=True):
        yield {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@cache
def one_rank(names: tuple[str, ...], data: int) -> list[tuple[float, float]]:
    """Loss and norm of each step of one rank, whose micro-batches have the samples of all `data` ranks."""
    config = {**config_of(names), "train_micro_batch_size_per_gpu": SAMPLES * data}
    steps, refusal = run_ranks(train, 1, config, data, small_numel=None)[0]
    assert not refusal, refusal
    return steps


def outcome(names: tuple[str, ...]) -> str:
    """ "" if training is equal to one process in fp32; else why it is refused, or what is wrong."""
    changing = tuple(name for name in names if name in CHANGING)
    config = config_of(names)
    world_size, data = ranks_of(config)
    with tempfile.TemporaryDirectory() as folder:
        offload = config.get("zero_optimization", {}).get("offload_optimizer", {})
        if "nvme_path" in offload:
            offload["nvme_path"] = folder
        # memory that ranks share, and the compiler, are of a process
        run = run_processes if {"shared", "compile"} & {*names} else run_ranks
        steps, refusal = run(train, world_size, config, small_numel=None)[0]
    if refusal:
        return refusal.removeprefix("config: ")
    near = max(NEAR[name] for name in ("fp32", *names) if name in NEAR)
    wanted = one_rank(changing, data) if changing else one_process("llama", data)
    if near > NEAR["fp32"]:  # norms of 16 bits are far less exact than losses
        steps, wanted = ([(loss, 1.0) for loss, _ in run] for run in (steps, wanted))
    found = worst(steps, wanted)
    return "" if found <= near else f"WRONG by {found:.0e}"


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


def page(found: Mapping[tuple[str, str], str]) -> str:
    """The page, of the outcome of every pair."""
    reasons: dict[str, list[str]] = {}
    for pair, refusal in found.items():
        for sentence in problems(refusal):
            reasons.setdefault(sentence, []).append(" + ".join(pair))
    rows = [
        f"| {name} | `{json.dumps(shown(setting))[1:-1]}` |" for name, setting in FEATURES.items()
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
