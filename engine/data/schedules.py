"""What a curriculum, progressive layer drop and random-LTD do at a step: functions of the config and the step.

progressive layer drop      theta(t) = (1 - theta) * exp(-gamma * t) + theta
fixed_linear, fixed_root    min + (max - min) * (t / total) ** (1 / root), in multiples of difficulty_step
fixed_discrete              a list of difficulties, and the last step of each
custom                      a function of the step
random-LTD                  min + (max - min) * t / require_steps, in multiples of seq_per_step

Keys, names and values are those of DeepSpeed 0.19. Nothing is kept between steps, so a run that resumes, and
every rank, find the same value.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ...utils.arguments import items, whole, wrong
from ...utils.errors import UsageError
from ...utils.quoting import quoted
from ...utils.schema.values import read_whole


@final
@dataclass(frozen=True)
class LayerDrop:
    """Progressive layer drop (arXiv 2010.13369): theta falls from 1 at step 0 to `theta`."""

    theta: float = 1.0
    gamma: float = 0.001

    def __post_init__(self) -> None:
        if not 0 < self.theta <= 1:
            raise UsageError(f"theta = {self.theta}: must be above 0 and at most 1")
        if not self.gamma >= 0:
            raise UsageError(f"gamma = {self.gamma}: must be at least 0")

    def at(self, step: int) -> float:
        """theta after `step` steps."""
        # numpy's exp, as DeepSpeed: the last bit of math.exp may differ
        return float((1.0 - self.theta) * np.exp(-self.gamma * step) + self.theta)


@final
@dataclass(frozen=True)
class FixedRoot:
    """A curriculum that rises as a root of the step; with root_degree 1 linearly."""

    min_difficulty: int
    max_difficulty: int
    total_curriculum_step: int
    difficulty_step: int
    root_degree: float = 1

    def __post_init__(self) -> None:
        for name in ("total_curriculum_step", "difficulty_step", "root_degree"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} = {getattr(self, name)}: must be above 0")

    def at(self, step: int) -> int:
        """The difficulty of a step: not below the first multiple from the minimum on, not above the maximum."""
        reached = _multiple_reached(
            (step / self.total_curriculum_step) ** (1.0 / self.root_degree),
            self.min_difficulty,
            self.max_difficulty,
            self.difficulty_step,
        )
        first = -(-self.min_difficulty // self.difficulty_step) * self.difficulty_step
        return min(max(reached, first), self.max_difficulty)


@final
@dataclass(frozen=True)
class FixedDiscrete:
    """A curriculum of given values: `difficulty[i]` up to and with step `max_step[i]`, then the last one."""

    difficulty: Sequence[Any]
    max_step: Sequence[int]

    def __post_init__(self) -> None:
        if not self.max_step or len(self.difficulty) != len(self.max_step) + 1:
            raise UsageError(
                "schedule_config: difficulty must have one entry more than max_step, which has at least one"
            )
        if list(self.max_step) != sorted(self.max_step):
            raise UsageError(f"max_step = {list(self.max_step)}: must be in ascending order")

    def at(self, step: int) -> Any:
        """The difficulty of a step."""
        return self.difficulty[bisect_left(self.max_step, step)]


@final
@dataclass(frozen=True)
class Custom:
    """A curriculum that is a function of the step."""

    function: Callable[[int], Any]

    def at(self, step: int) -> Any:
        """The difficulty of a step."""
        return self.function(step)


Curriculum = FixedRoot | FixedDiscrete | Custom
KINDS = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")
_KEYS = ("total_curriculum_step", "difficulty_step", "root_degree", "difficulty", "max_step")


def curriculum(
    config: Mapping[str, Any], function: Callable[[int], Any] | None = None
) -> Curriculum:
    """The schedule of a section: min_difficulty, max_difficulty, schedule_type and schedule_config.

    Args:
        function: that of the schedule "custom".

    Raises:
        UsageError: a key is absent, a value is impossible, or "custom" has no function.
    """
    _need(config, "schedule_type")
    kind, section = config["schedule_type"], config.get("schedule_config", {})
    if kind == "custom":
        if function is None:
            raise UsageError(
                'schedule_type = "custom": its function of the step is not given; pass it to '
                "engine.set_custom_curriculum_learning_schedule before the first step"
            )
        return Custom(function)
    _refuse_others(section, _KEYS)
    if kind == "fixed_discrete":
        _need(section, "difficulty", "max_step")
        values = items("difficulty", section["difficulty"], "a list of numbers")
        ends = items("max_step", section["max_step"], "a list of steps")
        return FixedDiscrete(
            [_number("difficulty", value) for value in values],
            [whole("max_step", read_whole(end), 0) for end in ends],
        )
    if kind not in KINDS:
        raise UsageError(f"schedule_type = {quoted(kind)}: must be one of {', '.join(KINDS)}")
    _need(config, "min_difficulty", "max_difficulty")
    more = ("root_degree",) if kind == "fixed_root" else ()
    _need(section, "total_curriculum_step", "difficulty_step", *more)
    return FixedRoot(
        _number("min_difficulty", config["min_difficulty"]),
        _number("max_difficulty", config["max_difficulty"]),
        section["total_curriculum_step"],
        whole("difficulty_step", read_whole(section["difficulty_step"]), 1),
        *(section[name] for name in more),
    )


@final
@dataclass(frozen=True)
class TokensKept:
    """Random-LTD (arXiv 2211.11586): how many tokens of a sequence the chosen layers compute."""

    min_value: int
    max_value: int
    require_steps: int
    seq_per_step: int

    def __post_init__(self) -> None:
        for name in ("require_steps", "seq_per_step"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} = {getattr(self, name)}: must be above 0")
        if self.min_value > self.max_value:
            raise UsageError(
                f"min_value = {self.min_value}: must be at most max_value = {self.max_value}"
            )
        if self.min_value < self.seq_per_step:
            raise UsageError(
                f"min_value = {self.min_value}, max_value = {self.max_value}: with seq_per_step = "
                f"{self.seq_per_step} no token would be left; raise min_value to at least seq_per_step"
            )

    def at(self, step: int) -> int:
        """The number of tokens at a step."""
        part = step / self.require_steps
        reached = _multiple_reached(part, self.min_value, self.max_value, self.seq_per_step)
        return min(reached, self.max_value)

    def layer_tokens(self, step: int, samples: int, num_layers: int, num_ltd_layers: int) -> int:
        """The tokens that all layers together compute in a step of `samples` sequences."""
        kept = self.at(step) * num_ltd_layers
        return samples * (kept + self.max_value * (num_layers - num_ltd_layers))


def tokens_kept(config: Mapping[str, Any]) -> TokensKept:
    """The schedule of the section `random_ltd_schedule`.

    Raises:
        UsageError: a key is absent, or a value is impossible.
    """
    _need(config, "min_value", "max_value", "schedule_type", "schedule_config")
    if config["schedule_type"] != "fixed_linear":
        raise UsageError(f"schedule_type = {quoted(config['schedule_type'])}: must be fixed_linear")
    section = config["schedule_config"]
    _need(section, "require_steps", "seq_per_step")
    _refuse_others(config, ("min_value", "max_value", "schedule_type", "schedule_config"))
    _refuse_others(section, ("require_steps", "seq_per_step"))
    return TokensKept(
        whole("min_value", read_whole(config["min_value"]), 1),
        whole("max_value", read_whole(config["max_value"]), 1),
        section["require_steps"],
        whole("seq_per_step", read_whole(section["seq_per_step"]), 1),
    )


def _multiple_reached(part: float, low: int, high: int, unit: int) -> int:
    """`part` of the way from `low` to `high`, rounded down to a multiple of `unit`."""
    reached = math.floor(part * (high - low) + low)
    return reached - reached % unit


def _need(section: Mapping[str, Any], *keys: str) -> None:
    absent = [key for key in keys if key not in section]
    if absent:
        raise UsageError(
            f"the schedule needs the key{'s' if absent[1:] else ''} {', '.join(absent)}"
        )


def _refuse_others(section: Mapping[str, Any], known: Sequence[str]) -> None:
    others = [key for key in section if key not in known and not key.startswith("_")]
    if others:
        raise UsageError(
            f"{quoted(others[0])} is an unknown key; the keys here are {', '.join(known)}"
        )


def _number(name: str, value: Any) -> Any:
    """`value`, a finite number; a whole one as an int."""
    read = read_whole(value)
    if isinstance(read, bool) or not isinstance(read, int | float) or not math.isfinite(read):
        raise wrong(name, value, "a finite number")
    return read


__all__ = [
    *("KINDS", "Curriculum", "Custom", "FixedDiscrete", "FixedRoot", "LayerDrop", "TokensKept"),
    *("curriculum", "tokens_kept"),
]
