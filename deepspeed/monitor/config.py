"""`deepspeed.monitor.config`: the config's sections of monitors, by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, final

from ...engine.config.sections import Comet as CometConfig
from ...engine.config.sections import CsvMonitor as CSVConfig
from ...engine.config.sections import TensorBoard as TensorBoardConfig
from ...engine.config.sections import Wandb as WandbConfig
from ...utils.errors import ConfigError
from ...utils.schema.keys import Report
from ...utils.schema.section import Section, read_section
from ..errors import raises_theirs
from ..missing import placeholder

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


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = [
    "CSVConfig",
    "CometConfig",
    "DeepSpeedMonitorConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "get_monitor_config",
]
