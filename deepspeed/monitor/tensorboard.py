"""`TensorBoardMonitor`: DeepSpeed's monitor for TensorBoard, over the engine's writer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from ...engine.telemetry.monitor import TensorBoardWriter
from ..missing import placeholder
from .section import Event, SectionMonitor


@final
class TensorBoardMonitor(SectionMonitor):
    """Writes events for TensorBoard, on rank 0."""

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config, TensorBoardWriter)

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Write the events; `flush` has no effect, they are in the file."""
        super().write_events(event_list)

    def flush(self) -> None:
        """Does nothing: each write is in the file."""


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["TensorBoardMonitor"]
