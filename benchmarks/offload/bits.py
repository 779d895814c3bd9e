"""Counts the cases whose every bit is that of the same run without offload."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from model import GPT, Shape

import xds
from xds.engine.steps.forecast import Forecast

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from harness import RankFailed, Row, run_ranks  # noqa: E402

SHAPE = Shape(layers=3, width=24, heads=2, context=8, vocabulary=61)  # odd: shards need padding
STEPS, SEQUENCES, CLIP = 6, 4, 1.1
ON_CPU = {"device": "cpu"}
VARIANTS: dict[str, dict[str, Any]] = {
    "ratio 0": {"offload_optimizer": {"device": "cpu", "ratio": 0.0}},
    "ratio 0.5": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "ratio 1": {"offload_optimizer": ON_CPU},
    "ratio 1, overlap_step": {"offload_optimizer": {"device": "cpu", "overlap_step": True}},
    "ratio 0.5, super_offload": {
        "offload_optimizer": {"device": "cpu", "ratio": 0.5, "super_offload": True}
    },
    "ratio 1, super_offload": {"offload_optimizer": {"device": "cpu", "super_offload": True}},
    "offload_param": {"offload_optimizer": ON_CPU, "offload_param": ON_CPU},
    "offload_param, super_offload": {
        "offload_optimizer": {"device": "cpu", "super_offload": True},
        "offload_param": ON_CPU,
    },
    "nvme": {"offload_optimizer": {"device": "nvme"}},
}


class Setting(NamedTuple):
    """What offload is combined with."""

    stage: int
    precision: str
    accumulation: int


SETTINGS = [Setting(*each) for each in product(range(4), ("fp32", "bf16", "fp16"), (1, 2))]


def rows(*, quick: bool) -> Iterator[Row]:
    """A row for each number of ranks and each way to offload."""
    settings = SETTINGS[::5] if quick else SETTINGS
    for world_size in (1, 2):
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        with tempfile.TemporaryDirectory(prefix="bits-") as folder:
            try:
                found = run_ranks(_compare, world_size, settings, folder)
            except RankFailed as error:
                print(error, flush=True)
                yield Row(f"equal cases, {ranks}", unit="", void="FAIL", note="a rank failed")
                continue
        for variant in VARIANTS:
            yield _row(
                f"equal cases, {ranks}, {variant}", [each.get(variant, {}) for each in found]
            )


def _row(name: str, ranks: list[dict[str, Any]]) -> Row:
    row = Row(name, unit="", more_is_better=True)
    if reason := ranks[0].get("missing"):
        row.void, row.note = "not measured", reason
        return row
    row.must = ranks[0]["cases"]
    row.value = min(rank["equal"] for rank in ranks)
    events = ", ".join(f"{ranks[0][kind]} {kind}" for kind in ("clipped", "skipped"))
    row.note = f"of {row.must} cases; steps of them: {events}"
    if "super_offload" in name:
        row.note += f"; updates during backward that counted: {ranks[0]['guesses']}"
    return row


def _compare(
    rank: int, world_size: int, settings: list[Setting], folder: str
) -> dict[str, dict[str, Any]]:
    """Counts for each variant. Runs on every rank."""
    logging.getLogger("xds").setLevel(logging.ERROR)  # skipped steps are wanted here
    counts: dict[str, Counter[str]] = {name: Counter() for name in VARIANTS}
    missing: dict[str, str] = {}
    for setting in settings:
        plain = _train(setting, {}, rank, world_size)
        for name, variant in VARIANTS.items():
            if "offload_param" in variant and setting.stage < 3:
                continue
            if "overlap_step" in name and setting.stage == 3:
                continue
            offload = _with_folder(variant, folder)
            try:
                found = _train(setting, offload, rank, world_size)
            except xds.ConfigError as error:
                missing[name] = str(error).strip().split("\n")[-1]
                continue
            counts[name] += Counter(
                cases=1,
                equal=int(_is_equal(plain, found)),
                clipped=found["clipped"],
                skipped=found["skipped"],
                guesses=found["guesses"],
            )
    reasons = {name: {"missing": text} for name, text in missing.items()}
    zero = dict.fromkeys(("cases", "equal", "clipped", "skipped", "guesses"), 0)
    return {name: zero | dict(count) for name, count in counts.items()} | reasons


def _with_folder(variant: dict[str, Any], folder: str) -> dict[str, Any]:
    return {
        section: keys | ({"nvme_path": folder} if keys["device"] == "nvme" else {})
        for section, keys in variant.items()
    }


def _train(setting: Setting, offload: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Steps of which some are clipped, and with fp16 some skipped; every number that results.

    Updates during backward are always begun, so that those of clipped and skipped steps are undone.
    """
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    with mock.patch.object(Forecast, "is_plain", lambda forecast, limit: True):
        engine = xds.initialize(GPT(SHAPE), _config(setting, offload, world_size))
        numbers: list[Any] = []
        clipped = skipped = 0
        for _ in range(STEPS):
            for _ in range(setting.accumulation):
                size = (SEQUENCES, SHAPE.context + 1)
                tokens = torch.randint(SHAPE.vocabulary, size, generator=generator)
                loss = engine(tokens.chunk(world_size)[rank])
                engine.backward(loss)
                engine.step()
                numbers.append(loss.item())
            norm, was_applied = engine.get_global_grad_norm(), engine.was_step_applied()
            skipped += not was_applied
            clipped += was_applied and norm > CLIP
            numbers += [norm, was_applied]
    guesses, is_away = engine._parts.updater._guesses, engine.memory_plan()["host"] > 0
    values = engine.full_state_dict(rank0_only=False, full_precision=True)
    computed = engine.full_state_dict(rank0_only=False)
    first = engine.module.blocks[0].qkv.weight
    states = {
        name: xds.zero.get_full_optimizer_state(first, name) for name in ("exp_avg", "exp_avg_sq")
    }
    engine.destroy()
    return {
        "numbers": repr(numbers),  # as text: norms that are nan are equal
        "tensors": [*values.values(), *computed.values(), *states.values()],
        "is_away": is_away,  # some states are on the host
        "is_kept": offload.get("offload_optimizer", {}).get("ratio") == 0.0,
        "clipped": int(clipped),
        "skipped": skipped,
        "guesses": guesses.num_used if guesses is not None else 0,
    }


def _config(setting: Setting, offload: dict[str, Any], world_size: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SEQUENCES // world_size,
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": setting.stage,
            "unit_min_numel": 0,
            "stage3_param_persistence_threshold": 0,
            **offload,
        },
    }
    if setting.precision != "fp32":
        config[setting.precision] = {"enabled": True}
    if setting.precision == "fp16":
        config["fp16"]["initial_scale_power"] = 19  # the first steps overflow
    return config


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = zip(one["tensors"], other["tensors"], strict=True)
    is_away = other["is_away"] != other["is_kept"]
    return (
        is_away and one["numbers"] == other["numbers"] and all(torch.equal(a, b) for a, b in pairs)
    )


__all__ = ["rows"]
