"""`deepspeed.runtime.data_pipeline.curriculum_scheduler`: the difficulty of samples by step, for own loops.

fixed_linear, fixed_root    min + (max - min) * (step / total) ** (1 / root), in multiples of difficulty_step
fixed_discrete              a list of difficulties and the last step of each
custom                      a function of the step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from ....utils.errors import UsageError
from ..errors import methods_raise_theirs

Schedule = Callable[[int], Any]


@final
@methods_raise_theirs
class CurriculumScheduler:
    """
    Args:
        config: min_difficulty, max_difficulty, schedule_type, schedule_config. The engine does not run it: the
            section of a config that names one is refused.
    Raises:
        UsageError: a key is absent, or lists do not fit together.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        _need(config, "min_difficulty", "max_difficulty", "schedule_type")
        self.state: dict[str, Any] = {
            "min_difficulty": config["min_difficulty"],
            "max_difficulty": config["max_difficulty"],
            "current_difficulty": config["min_difficulty"],
            "schedule_type": config["schedule_type"],
        }
        self.custom_get_difficulty: Schedule | None = None
        kind, section = config["schedule_type"], config.get("schedule_config", {})
        if kind == "fixed_discrete":
            _need(section, "difficulty", "max_step")
            if (
                not section["max_step"]
                or len(section["difficulty"]) != len(section["max_step"]) + 1
            ):
                raise UsageError(
                    "schedule_config: difficulty must have one entry more than max_step, which has at least one"
                )
        elif kind in ("fixed_linear", "fixed_root"):
            more = ("root_degree",) if kind == "fixed_root" else ()
            _need(section, "total_curriculum_step", "difficulty_step", *more)
        elif kind != "custom":
            raise RuntimeError(f"schedule_type = {kind!r}: no such schedule")
        if kind != "custom":
            self.state["schedule_config"] = section

    def set_custom_get_difficulty(self, schedule_function: Schedule) -> None:
        """The function of the schedule "custom"."""
        self.custom_get_difficulty = schedule_function

    def get_difficulty(self, global_steps: int) -> Any:
        """The difficulty of a step.

        Raises:
            UsageError: a custom schedule without a function.
        """
        kind = self.state["schedule_type"]
        if kind == "custom":
            if self.custom_get_difficulty is None:
                raise UsageError("call set_custom_get_difficulty(function) first")
            return self.custom_get_difficulty(global_steps)
        section = self.state["schedule_config"]
        if kind == "fixed_discrete":
            passed = sum(global_steps > last for last in section["max_step"])
            return section["difficulty"][passed]
        return self._rise(global_steps, section["root_degree"] if kind == "fixed_root" else 1)

    def _rise(self, step: int, root: float) -> int:
        """A multiple of difficulty_step, not below the minimum's next one and not above the maximum."""
        section = self.state["schedule_config"]
        low, high = self.state["min_difficulty"], self.state["max_difficulty"]
        unit = section["difficulty_step"]
        part = (step / section["total_curriculum_step"]) ** (1.0 / root)
        reached = int(part * (high - low) + low) // unit * unit
        return int(min(max(reached, -(-low // unit) * unit), high))

    def update_difficulty(self, global_steps: int) -> Any:
        """Go to a step; returns its difficulty. The maximum, once reached, stays."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]

    def get_current_difficulty(self) -> Any:
        return self.state["current_difficulty"]

    def set_current_difficulty(self, difficulty: Any) -> None:
        self.state["current_difficulty"] = difficulty

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state


def _need(section: Mapping[str, Any], *keys: str) -> None:
    absent = [key for key in keys if key not in section]
    if absent:
        raise UsageError(
            f"curriculum learning needs the key{'s' if absent[1:] else ''} {', '.join(absent)}"
        )
