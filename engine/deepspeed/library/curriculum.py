"""`deepspeed.runtime.data_pipeline.curriculum_scheduler`: the difficulty of samples by step, for own loops.

The schedules are those of engine/data/schedules.py; here is DeepSpeed's object with a current difficulty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from ....utils.errors import UsageError
from ...data.schedules import KINDS, curriculum
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
        if "schedule_config" in config:
            self.state["schedule_config"] = config["schedule_config"]
        if config["schedule_type"] not in KINDS:
            raise RuntimeError(f"schedule_type = {config['schedule_type']!r}: no such schedule")
        curriculum(self.state, _unset)  # raises where the section is wrong

    def set_custom_get_difficulty(self, schedule_function: Schedule) -> None:
        """The function of the schedule "custom"."""
        self.custom_get_difficulty = schedule_function

    def get_difficulty(self, global_steps: int) -> Any:
        """The difficulty of a step.

        Raises:
            UsageError: a custom schedule without a function.
        """
        return curriculum(self.state, self.custom_get_difficulty or _unset).at(global_steps)

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


def _unset(step: int) -> Any:
    raise UsageError("call set_custom_get_difficulty(function) first")


def _need(section: Mapping[str, Any], *keys: str) -> None:
    absent = [key for key in keys if key not in section]
    if absent:
        raise UsageError(
            f"curriculum learning needs the key{'s' if absent[1:] else ''} {', '.join(absent)}"
        )
