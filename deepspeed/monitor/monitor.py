"""`MonitorMaster` and the base of DeepSpeed's monitors: rank 0 writes events with the engine's own writers.

An event is (name, value, number of samples).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ...engine.telemetry.monitor import Writer
from ..errors import raises_theirs
from ..missing import placeholder

Event = tuple[str, Any, int]


class Monitor(ABC):
    """A destination of events. A subclass may write anywhere."""

    @abstractmethod
    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write the events. Ranks other than 0 write nothing."""


class SectionMonitor(Monitor):
    """The monitor of one section of the config; its keys are attributes too.

    Args:
        section: of the config.
        make: opens the writer, on rank 0 where the section is switched on.
    """

    writer: Writer | None = None

    @raises_theirs
    def __init__(self, section: Any, make: Callable[[Any], Writer]) -> None:
        """
        Raises:
            UsageError: a folder cannot be written.
            ImportError: the service's package is not installed.
        """
        super().__init__(section)
        self.enabled: bool = section.enabled
        if self.enabled and is_first_rank():
            self.writer = make(section)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write the events; a value is anything that float() accepts."""
        if self.writer is not None:
            self.writer.write([(name, float(value), int(step)) for name, value, step in event_list])

    def __getattr__(self, name: str) -> Any:
        if name == "monitor_config":  # before __init__
            raise AttributeError(name)
        return getattr(self.monitor_config, name)


def is_first_rank() -> bool:
    """Whether this rank writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


class MonitorMaster(Monitor):
    """All monitors that are switched on in a `DeepSpeedMonitorConfig`. On ranks other than 0 there are none."""

    def __init__(self, monitor_config: Any) -> None:
        from .comet import CometMonitor
        from .csv_monitor import csvMonitor
        from .tensorboard import TensorBoardMonitor
        from .wandb import WandbMonitor

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
