"""`MonitorMaster` and the base of DeepSpeed's monitors: rank 0 writes events with the engine's own writers.

An event is (name, value, number of samples).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

import torch.distributed as dist

from ....utils.errors import ConfigError
from ....utils.schema.keys import Report
from ....utils.schema.section import Section, read_section
from ...config.sections import Comet as CometConfig
from ...config.sections import CsvMonitor as CSVConfig
from ...config.sections import TensorBoard as TensorBoardConfig
from ...config.sections import Wandb as WandbConfig
from ...telemetry.monitor import CometWriter, CsvWriter, TensorBoardWriter, WandbWriter, Writer
from ..errors import raises_theirs

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
class csvMonitor(SectionMonitor):
    """Writes events for CSV files, on rank 0."""

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config, CsvWriter)


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


@final
class WandbMonitor(SectionMonitor):
    """Writes events for Weights & Biases, on rank 0."""

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config, WandbWriter)


S = TypeVar("S", bound=Section)

SECTIONS = ("tensorboard", "wandb", "csv_monitor", "comet")


@final
class DeepSpeedMonitorConfig:
    """The sections of all monitors. Each argument is a section, or a dict of its keys; None is the default."""

    @raises_theirs
    def __init__(
        self, tensorboard: Any = None, comet: Any = None, wandb: Any = None, csv_monitor: Any = None
    ) -> None:
        """
        Raises:
            ConfigError: lists what is wrong.
        """
        self.tensorboard = _read(TensorBoardConfig, tensorboard, "tensorboard")
        self.comet = _read(CometConfig, comet, "comet")
        self.wandb = _read(WandbConfig, wandb, "wandb")
        self.csv_monitor = _read(CSVConfig, csv_monitor, "csv_monitor")

    @property
    def enabled(self) -> bool:
        """Whether any of them is switched on."""
        return any(getattr(self, name).enabled for name in SECTIONS)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The sections of a config. Raises ConfigError: lists what is wrong."""
    return DeepSpeedMonitorConfig(**{name: param_dict.get(name) for name in SECTIONS})


def _read(kind: type[S], given: Any, path: str) -> S:
    if isinstance(given, kind):
        return given
    report = Report()
    found = read_section(kind, {} if given is None else given, path, report)
    if report.complaints:
        raise ConfigError(report.complaints, "config")
    return found


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
