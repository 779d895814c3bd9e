"""The config section `scheduler`: known types, their arguments, and refused types."""

from __future__ import annotations

from typing import Annotated, Any, Literal, final

from pydantic import Field

from ...ops.optim.config import AT_LEAST_0, BETA, RATE, Rate
from ...utils.schema.section import Report, Section
from ...utils.schema.values import (
    ANY_CASE,
    COUNT,
    FLAG,
    NATURAL,
    NUMBER,
    TUPLE,
    WHOLE,
    Natural,
    Object,
    Positive,
    Share,
    Value,
)
from .classes import COUNT_OR_NULL, ClassTable

# one for all parameter groups, or one for each
_Rates = Rate | Annotated[tuple[Rate, ...], Field(min_length=1, fail_fast=True), TUPLE]
_RATES = Value(_Rates)
_SHARE = Value(Share)
_SHARES = Value(Share | Annotated[tuple[Share, ...], Field(min_length=1, fail_fast=True), TUPLE])
_ABOVE_0 = Value(Positive)


def _names(*names: str) -> Value:
    return Value(Annotated[Literal[names], ANY_CASE])


_START: dict[str, Value] = {
    "last_batch_iteration": Value(Annotated[int, Field(ge=-1), WHOLE]),
}
_WARMUP: dict[str, Value] = {
    **_START,
    "warmup_min_lr": _RATES,
    "warmup_max_lr": Value(_Rates | None),
    "warmup_num_steps": NATURAL,
    "warmup_type": _names("log", "linear"),
}
_BUILT_IN: dict[str, dict[str, Value]] = {
    "LRRangeTest": {
        **_START,
        "lr_range_test_min_lr": _RATES,
        "lr_range_test_step_size": COUNT,
        "lr_range_test_step_rate": NUMBER,
        "lr_range_test_staircase": FLAG,
    },
    "OneCycle": {
        **_START,
        "cycle_min_lr": _RATES,
        "cycle_max_lr": _RATES,
        "decay_lr_rate": AT_LEAST_0,
        "cycle_first_step_size": COUNT,
        "cycle_second_step_size": COUNT_OR_NULL,
        "cycle_first_stair_count": NATURAL,
        "cycle_second_stair_count": Value(Natural | None),
        "decay_step_size": NATURAL,
        "cycle_momentum": FLAG,
        "cycle_min_mom": BETA,
        "cycle_max_mom": BETA,
        "decay_mom_rate": AT_LEAST_0,
    },
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {**_WARMUP, "warmup_max_lr": _RATES, "total_num_steps": COUNT},
    "WarmupCosineLR": {
        **_START,
        "total_num_steps": COUNT,
        "warmup_min_ratio": AT_LEAST_0,
        "warmup_num_steps": NATURAL,
        "cos_min_ratio": AT_LEAST_0,
        "warmup_type": _names("log", "linear"),
    },
}

_TORCH: dict[str, Value] = {"last_epoch": Value(Annotated[Literal[-1], WHOLE])}
_CYCLE: dict[str, Value] = {
    **_TORCH,
    "max_lr": _RATES,
    "cycle_momentum": FLAG,
    "base_momentum": _SHARES,
    "max_momentum": _SHARES,
}
_FROM_TORCH: dict[str, dict[str, Value]] = {
    "StepLR": {**_TORCH, "step_size": COUNT, "gamma": AT_LEAST_0},
    "MultiStepLR": {
        **_TORCH,
        "milestones": Value(Annotated[tuple[Natural, ...], Field(fail_fast=True), TUPLE]),
        "gamma": AT_LEAST_0,
    },
    "ConstantLR": {**_TORCH, "factor": _SHARE, "total_iters": NATURAL},
    "LinearLR": {
        **_TORCH,
        "start_factor": Value(Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]),
        "end_factor": _SHARE,
        "total_iters": NATURAL,
    },
    "ExponentialLR": {**_TORCH, "gamma": AT_LEAST_0},
    "PolynomialLR": {**_TORCH, "total_iters": NATURAL, "power": NUMBER},
    "CosineAnnealingLR": {**_TORCH, "T_max": COUNT, "eta_min": RATE},
    "CosineAnnealingWarmRestarts": {**_TORCH, "T_0": COUNT, "T_mult": COUNT, "eta_min": RATE},
    "CyclicLR": {
        **_CYCLE,
        "base_lr": _RATES,
        "step_size_up": COUNT,
        "step_size_down": COUNT_OR_NULL,
        "mode": _names("triangular", "triangular2", "exp_range"),
        "gamma": AT_LEAST_0,
        "scale_fn": Value(None),
        "scale_mode": _names("cycle", "iterations"),
    },
    "OneCycleLR": {
        **_CYCLE,
        "total_steps": COUNT_OR_NULL,
        "epochs": COUNT_OR_NULL,
        "steps_per_epoch": COUNT_OR_NULL,
        "pct_start": _SHARE,
        "anneal_strategy": _names("cos", "linear"),
        "div_factor": _ABOVE_0,
        "final_div_factor": _ABOVE_0,
        "three_phase": FLAG,
    },
}
_PASS_IT = "takes functions or objects, which JSON cannot hold; pass lr_scheduler to xds.initialize"

SCHEDULERS = ClassTable(
    section="scheduler",
    what="schedule",
    example="WarmupLR",
    built_in=_BUILT_IN,
    from_torch=_FROM_TORCH,
    required={
        "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
        "WarmupDecayLR": ("total_num_steps",),
        "WarmupCosineLR": ("total_num_steps",),
        "StepLR": ("step_size",),
        "MultiStepLR": ("milestones",),
        "ExponentialLR": ("gamma",),
        "CosineAnnealingLR": ("T_max",),
        "CosineAnnealingWarmRestarts": ("T_0",),
        "CyclicLR": ("base_lr", "max_lr"),
        "OneCycleLR": ("max_lr",),
    },
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


WARMUP_STEPS, CYCLE_STEPS = 1000, 2000  # the defaults of the schedules


def warmup_steps(scheduler: SchedulerConfig | None) -> int:
    """The steps in which the schedule raises the learning rate."""
    if scheduler is None:
        return 0
    if scheduler.type.startswith("Warmup"):
        return int(scheduler.params.get("warmup_num_steps", WARMUP_STEPS))
    if scheduler.type == "OneCycle":
        return int(scheduler.params.get("cycle_first_step_size", CYCLE_STEPS))
    return 0


@final
class SchedulerConfig(Section):
    """The learning-rate schedule that the engine builds if the script passes none."""

    type: str = Field("", description="name of the schedule, in any case; must be given")
    params: Object = Field(default_factory=dict, description="its arguments")

    @classmethod
    def read_own(cls, values: dict[str, Any], path: str, report: Report) -> None:
        """Read the arguments of this type."""
        if SCHEDULERS.read(values, report):
            SCHEDULERS.complain_order(values["params"], report, "cycle_min_mom <= cycle_max_mom")

    def check(self, report: Report) -> None:
        """Check what is missing, and lengths that contradict one another."""
        SCHEDULERS.complain_missing(self, report)
        params = self.params
        if (
            self.type == "OneCycleLR"
            and params.get("total_steps") is None
            and not report.complaints
        ):
            if None in (params.get("epochs"), params.get("steps_per_epoch")):
                report.complaints.append(
                    "scheduler.params.total_steps: is missing; write it, or both epochs and steps_per_epoch"
                )
        warmup, total = params.get("warmup_num_steps"), params.get("total_num_steps")
        if warmup is not None and total is not None and warmup > total:
            report.notes.append(
                f"scheduler.params.warmup_num_steps = {warmup} is above total_num_steps = {total}: "
                "the schedule never leaves its warm-up"
            )
