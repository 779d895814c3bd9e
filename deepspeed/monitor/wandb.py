"""`WandbMonitor`: DeepSpeed's monitor for Weights & Biases, over the engine's writer."""

from __future__ import annotations

from typing import Any, final

from ...engine.telemetry.monitor import WandbWriter
from ..missing import placeholder
from .section import SectionMonitor


@final
class WandbMonitor(SectionMonitor):
    """Writes events for Weights & Biases, on rank 0."""

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config, WandbWriter)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["WandbMonitor"]
