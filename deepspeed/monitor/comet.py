"""`CometMonitor`: DeepSpeed's monitor for Comet, over the engine's writer."""

from __future__ import annotations

from typing import Any, final

from ...engine.telemetry.monitor import CometWriter
from ..missing import placeholder
from .section import SectionMonitor


@final
class CometMonitor(SectionMonitor):
    """Writes events for Comet, on rank 0."""

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config, CometWriter)

    @property
    def experiment(self) -> Any:
        """Comet's experiment; None on ranks other than 0, and where the section is switched off."""
        return getattr(self.writer, "experiment", None)


@final
class EventsLogScheduler:
    """Which events are sent: each name again after so many samples."""

    def __init__(self, samples_log_interval: int) -> None:
        self._interval = samples_log_interval
        self._last: dict[str, int] = {}

    def needs_logging(self, name: str, current_sample: int) -> bool:
        """Whether the event is sent now; then the next interval begins."""
        last = self._last.get(name)
        is_due = last is None or current_sample - last >= self._interval
        if is_due:
            self._last[name] = current_sample
        return is_due


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["CometMonitor", "EventsLogScheduler"]
