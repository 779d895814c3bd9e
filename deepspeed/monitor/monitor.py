"""`MonitorMaster` and the base of DeepSpeed's monitors: rank 0 writes events with the engine's own writers.

An event is (name, value, number of samples).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..missing import placeholder
from .comet import CometMonitor
from .csv_monitor import csvMonitor
from .section import Event, Monitor, is_first_rank
from .tensorboard import TensorBoardMonitor
from .wandb import WandbMonitor


class MonitorMaster(Monitor):
    """All monitors that are switched on in a `DeepSpeedMonitorConfig`. On ranks other than 0 there are none."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.enabled: bool = monitor_config.enabled
        first = is_first_rank()

        def opened(kind: Any, section: Any) -> Any:
            return kind(section) if first and section.enabled else None

        self.tb_monitor = opened(TensorBoardMonitor, monitor_config.tensorboard)
        self.wandb_monitor = opened(WandbMonitor, monitor_config.wandb)
        self.csv_monitor = opened(csvMonitor, monitor_config.csv_monitor)
        self.comet_monitor = opened(CometMonitor, monitor_config.comet)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write the events to each of them."""
        every = (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor)
        for one in every:
            if one is not None:
                one.write_events(event_list)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["Monitor", "MonitorMaster"]
