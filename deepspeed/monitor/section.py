"""What the monitors of one section of the config have in common: `Monitor`, `SectionMonitor`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ...engine.telemetry.monitor import Writer
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


__all__ = ["Event", "Monitor", "SectionMonitor", "is_first_rank"]
