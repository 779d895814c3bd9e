"""`engine.timers`, `engine.tput_timer` and `engine.get_wall_clock_timers` of DeepSpeed's engine.

The engine measures its own regions; their times are added to the timers of DeepSpeed's names.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, final

from ...engine.engine import Engine
from ...engine.telemetry.breakdown import breakdown
from ..utils.timer import SynchronizedWallClockTimer, ThroughputTimer

_MICRO = "_microstep"
_NAMES = tuple(breakdown({"forward": 0.0}))


@final
class EngineTiming:
    """The timers of one engine. With `wall_clock_breakdown` they have the times of the current step."""

    def __init__(self, engine: Engine) -> None:
        self.timers = SynchronizedWallClockTimer()
        report, config = engine._parts.report, engine.config
        section = SimpleNamespace(enabled=config.timers.throughput.enabled, synchronized=False)
        self.tput_timer = ThroughputTimer(
            section, engine.train_batch_size(), steps_per_output=config.steps_per_print
        )
        self._is_first_rank = engine.global_rank == 0
        self._cache: dict[str, float] = {}
        self._ended = False
        report.timers.listener = self._region
        report.throughput.listener = self._step

    def attributes(self) -> dict[str, Any]:
        """What scripts read of an engine, by name."""
        return {
            "timers": self.timers,
            "tput_timer": self.tput_timer,
            "get_wall_clock_timers": self.get_wall_clock_timers,
        }

    def get_wall_clock_timers(self) -> dict[str, float]:
        """The times in ms of the last micro-batch and its step, by name; {} without wall_clock_breakdown."""
        return dict(self._cache)

    def _region(self, region: str, seconds: float) -> None:
        """A region of the engine has ended. The first one after a step begins new times."""
        if self._ended:
            self._ended = False
            for name in _NAMES:
                self.timers(name).reset()
        if region == "forward":
            for name in _NAMES:
                self.timers(name + _MICRO).reset()
        for name, milliseconds in breakdown({region: 1e3 * seconds}).items():
            if milliseconds:
                self.timers(name).add(milliseconds)
                self.timers(name + _MICRO).add(milliseconds)
        if region == "step":
            self._ended = True
            every = [name + suffix for suffix in (_MICRO, "") for name in _NAMES]
            self._cache = {name: self.timers(name).elapsed(reset=False) for name in every}

    def _step(self) -> None:
        """The engine has ended an optimizer step. A step lasts from the end of the last one."""
        if not self.tput_timer.started:  # the first step, of which no time is counted
            self.tput_timer.start()
        self.tput_timer.stop(global_step=True, report_speed=self._is_first_rank)
        self.tput_timer.start()


__all__ = ["EngineTiming"]
