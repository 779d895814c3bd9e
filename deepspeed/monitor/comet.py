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


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["CometMonitor"]
