"""`deepspeed.runtime.lr_schedules`: the five schedules, and the command-line arguments that describe one.

parser = add_tuning_arguments(argparse.ArgumentParser())
section, why_not = get_config_from_args(parser.parse_args())     # the config's section `scheduler`
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...engine.optim.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from ..missing import placeholder

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

# key of scheduler.params -> (type, DeepSpeed's default on the command line, help); bool is a flag
_RANGE_TEST: dict[str, tuple[type, Any, str]] = {
    "lr_range_test_min_lr": (float, 0.001, "first lr"),
    "lr_range_test_step_rate": (float, 1.0, "growth per interval, as a part of the first lr"),
    "lr_range_test_step_size": (int, 1000, "steps of an interval"),
    "lr_range_test_staircase": (bool, False, "grow once an interval, not in every step"),
}
_ONE_CYCLE: dict[str, tuple[type, Any, str]] = {
    "cycle_first_step_size": (int, 1000, "steps in which the lr rises"),
    "cycle_first_stair_count": (int, -1, "stairs of the rise; negative: none"),
    "cycle_second_step_size": (int, -1, "steps in which the lr falls; negative: as many"),
    "cycle_second_stair_count": (int, -1, "stairs of the fall; negative: as in the rise"),
    "decay_step_size": (int, 1000, "steps of an interval of the decay after the cycle"),
    "cycle_min_lr": (float, 0.01, "lowest lr of the cycle"),
    "cycle_max_lr": (float, 0.1, "highest lr of the cycle"),
    "decay_lr_rate": (float, 0.0, "decay of the lr per interval"),
    "cycle_momentum": (bool, False, "cycle beta1 too"),
    "cycle_min_mom": (float, 0.8, "lowest beta1 of the cycle"),
    "cycle_max_mom": (float, 0.9, "highest beta1 of the cycle"),
    "decay_mom_rate": (float, 0.0, "growth of beta1 per interval"),
}
_WARMUP: dict[str, tuple[type, Any, str]] = {
    "warmup_min_lr": (float, 0, "first lr"),
    "warmup_max_lr": (float, 0.001, "lr after the warm-up"),
    "warmup_num_steps": (int, 1000, "steps of the warm-up"),
    "warmup_type": (str, "log", "log or linear"),
}
_COSINE: dict[str, tuple[type, Any, str]] = {
    "warmup_min_ratio": (float, 0.01, "first factor on the optimizer's lr"),
    "cos_min_ratio": (float, 0.01, "last factor on the optimizer's lr"),
}
_COSINE_KEYS = ("warmup_num_steps", "warmup_type", *_COSINE)
_UNSET_IF_NEGATIVE = (
    "cycle_first_stair_count",
    "cycle_second_step_size",
    "cycle_second_stair_count",
)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`parser` with `--lr_schedule` and an argument for each parameter of the schedules."""
    group = parser.add_argument_group("learning-rate schedule")
    group.add_argument("--lr_schedule", default=None, help=", ".join(VALID_LR_SCHEDULES))
    for name, (kind, default, text) in (_RANGE_TEST | _ONE_CYCLE | _WARMUP | _COSINE).items():
        if kind is bool:
            group.add_argument(f"--{name}", action="store_true", default=default, help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """(the schedule's arguments of this process, all others)."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _copy(args: Any, names: Iterable[str], params: dict[str, Any]) -> None:
    for name in names:
        value = getattr(args, name, None)
        is_unset = value is None or (name in _UNSET_IF_NEGATIVE and value < 0)
        if not is_unset:
            params[name] = value


def override_lr_range_test_params(args: Any, params: dict[str, Any]) -> None:
    """Write into `params` what `args` has for LRRangeTest."""
    _copy(args, _RANGE_TEST, params)


def override_1cycle_params(args: Any, params: dict[str, Any]) -> None:
    """Write into `params` what `args` has for OneCycle. A negative count or size is one that is not set."""
    _copy(args, _ONE_CYCLE, params)


def override_warmupLR_params(args: Any, params: dict[str, Any]) -> None:  # noqa: N802 (DeepSpeed's name)
    """Write into `params` what `args` has for WarmupLR and WarmupDecayLR."""
    _copy(args, _WARMUP, params)


def override_warmupCosineLR_params(args: Any, params: dict[str, Any]) -> None:  # noqa: N802
    """Write into `params` what `args` has for WarmupCosineLR."""
    _copy(args, _COSINE_KEYS, params)


def override_params(args: Any, params: dict[str, Any]) -> None:
    """Write into `params` what `args` has for any schedule."""
    _copy(args, _RANGE_TEST | _ONE_CYCLE | _WARMUP | _COSINE, params)


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """(the section `scheduler` for these arguments, None), or (None, why there is none)."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} is not given on the command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is no schedule; use one of {', '.join(VALID_LR_SCHEDULES)}"
    names = {LR_RANGE_TEST: _RANGE_TEST, ONE_CYCLE: _ONE_CYCLE, WARMUP_COSINE_LR: _COSINE_KEYS}
    params: dict[str, Any] = {}
    _copy(args, names.get(name, _WARMUP), params)
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """(the lr that the section `scheduler` sets: first or highest, ""), or (None, why there is none)."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"the section scheduler has no key {key}"
    name, params = config["type"], config["params"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is no schedule; use one of {', '.join(VALID_LR_SCHEDULES)}"
    if name == WARMUP_COSINE_LR:
        return None, f"{WARMUP_COSINE_LR} scales the optimizer's lr, and sets none"
    keys = {LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}
    return params[keys.get(name, "warmup_max_lr")], ""


def get_torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """`optimizer`, or the torch optimizer inside it.

    Raises:
        TypeError: it is neither.
    """
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer, and wraps none")


def update_lr(param_groups: list[dict[str, Any]], lrs: Iterable[Any]) -> list[Any]:
    """Set the lr of each group; an lr that is a tensor is filled in place. Returns what the groups have."""
    for group, lr in zip(param_groups, lrs, strict=False):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr.squeeze() if isinstance(lr, torch.Tensor) else lr)
        else:
            group["lr"] = lr
    return [group["lr"] for group in param_groups]


__all__ = [
    "LR_RANGE_TEST",
    "ONE_CYCLE",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LR",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
]


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
