"""The config section `scheduler`: known types, their arguments, and refused types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, final

from pydantic import Field

from ...utils.schema.keys import Report
from ...utils.schema.rules import (
    FLAG,
    NULL,
    NUMBER,
    OBJECT,
    TEXT,
    either,
    list_of,
    number,
    one_of,
    whole,
)
from ...utils.schema.section import Section
from . import torch_classes
from .params import RATE, ClassTable, Param, read_params, require


@final
class SchedulerConfig(Section):
    """The learning-rate schedule that the engine builds if the script passes none."""

    type: Annotated[str, TEXT] = Field(
        "", description="name of the schedule, in any case; must be given"
    )
    params: Annotated[dict[str, Any], OBJECT] = Field(
        default_factory=dict, description="its arguments"
    )


_RATE = either(RATE, list_of(RATE, 1))  # one for all parameter groups, or one for each
_STEPS = whole(1)
_WARMUP_STEPS = whole(0)
_START: dict[str, Param] = {"last_batch_iteration": whole(-1)}
_WARMUP: dict[str, Param] = {
    **_START,
    "warmup_min_lr": _RATE,
    "warmup_max_lr": either(_RATE, NULL),
    "warmup_num_steps": _WARMUP_STEPS,
    "warmup_type": one_of("log", "linear"),
}

_BUILT_IN: dict[str, dict[str, Param]] = {
    "LRRangeTest": {
        **_START,
        "lr_range_test_min_lr": _RATE,
        "lr_range_test_step_size": _STEPS,
        "lr_range_test_step_rate": NUMBER,
        "lr_range_test_staircase": FLAG,
    },
    "OneCycle": {
        **_START,
        "cycle_min_lr": _RATE,
        "cycle_max_lr": _RATE,
        "decay_lr_rate": number(0),
        "cycle_first_step_size": _STEPS,
        "cycle_second_step_size": either(_STEPS, NULL),
        "cycle_first_stair_count": whole(0),
        "cycle_second_stair_count": either(whole(0), NULL),
        "decay_step_size": whole(0),
        "cycle_momentum": FLAG,
        "cycle_min_mom": number(0, below=1),
        "cycle_max_mom": number(0, below=1),
        "decay_mom_rate": number(0),
    },
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {**_WARMUP, "warmup_max_lr": _RATE, "total_num_steps": _STEPS},
    "WarmupCosineLR": {
        **_START,
        "total_num_steps": _STEPS,
        "warmup_min_ratio": number(0),
        "warmup_num_steps": _WARMUP_STEPS,
        "cos_min_ratio": number(0),
        "warmup_type": one_of("log", "linear"),
    },
}
REQUIRED = {
    **torch_classes.REQUIRED,
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}
_PASS_IT = "takes functions or objects, which JSON cannot hold; pass lr_scheduler to xds.initialize"
SCHEDULERS = ClassTable(
    section="scheduler",
    what="schedule",
    example="WarmupLR",
    built_in=_BUILT_IN,
    from_torch=torch_classes.SCHEDULERS,
    refused={
        **dict.fromkeys(
            ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"), _PASS_IT
        ),
        "ReduceLROnPlateau": "needs a metric at each step; step it in the script",
    },
    other_names={
        **dict.fromkeys(("linear", "linear_with_warmup"), "WarmupDecayLR"),
        **dict.fromkeys(("cosine", "cosine_with_warmup", "warmupcosine"), "WarmupCosineLR"),
        **dict.fromkeys(("warmup", "constant_with_warmup"), "WarmupLR"),
    },
)


def check_scheduler(given: SchedulerConfig, report: Report) -> SchedulerConfig:
    """The section with the canonical type and its arguments read."""
    name = SCHEDULERS.find(given.type, report)
    if name is None:
        return given
    params = read_params(SCHEDULERS.table(name), given.params, "scheduler.params", report)
    require(given.params, REQUIRED.get(name, ()), "scheduler.params", report)
    _check_together(name, params, report)
    return SchedulerConfig.model_construct(type=name, params=params)


def _check_together(name: str, params: Mapping[str, Any], report: Report) -> None:
    if name == "OneCycleLR":
        _check_length(params, report)
    warmup, total = params.get("warmup_num_steps"), params.get("total_num_steps")
    if warmup is not None and total is not None and warmup > total:
        report.notes.append(
            f"scheduler.params.warmup_num_steps = {warmup} is above total_num_steps = {total}: "
            "the schedule never leaves its warm-up"
        )
    low, high = params.get("cycle_min_mom"), params.get("cycle_max_mom")
    if low is not None and high is not None and low > high:
        report.complain(
            "scheduler.params.cycle_min_mom",
            low,
            f"must not exceed cycle_max_mom ({high:g}); swap the two",
        )


def _check_length(params: Mapping[str, Any], report: Report) -> None:
    """torch's OneCycleLR needs its length, in one of two ways."""
    paths = [f"scheduler.params.{key}" for key in ("total_steps", "epochs", "steps_per_epoch")]
    is_given = [params.get(path.rpartition(".")[2]) is not None for path in paths]
    if not is_given[0] and not all(is_given[1:]) and not report.complaints:
        report.complaints.append(
            f"{paths[0]}: is missing; write it, or both epochs and steps_per_epoch"
        )
