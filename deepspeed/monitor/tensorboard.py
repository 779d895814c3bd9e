"""`TensorBoardMonitor`: DeepSpeed's monitor for TensorBoard, over the engine's writer."""

from __future__ import annotations

from typing import Any, final

from ...engine.telemetry.monitor import TensorBoardWriter
from ..missing import placeholder
from .section import SectionMonitor


@final
class TensorBoardMonitor(SectionMonitor):
    """Writes events for TensorBoard, on rank 0."""

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config, TensorBoardWriter)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["TensorBoardMonitor"]
