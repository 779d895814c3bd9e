"""`csvMonitor`: DeepSpeed's monitor for CSV files, over the engine's writer."""

from __future__ import annotations

from typing import Any, final

from ...engine.telemetry.monitor import CsvWriter
from ..missing import placeholder
from .section import SectionMonitor


@final
class csvMonitor(SectionMonitor):
    """Writes events for CSV files, on rank 0."""

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config, CsvWriter)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["csvMonitor"]
