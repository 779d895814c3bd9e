"""Time between two moments of the device that computes, without waiting for it in between."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, final

import torch


class Clock(ABC):
    """Takes moments; their distances are asked for at the end."""

    @abstractmethod
    def now(self) -> Any:
        """This moment."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the device has passed all moments. Before `seconds`."""

    @abstractmethod
    def seconds(self, start: Any, stop: Any) -> float:
        """The time between two moments."""


@final
class WallClock(Clock):
    """A CPU computes when it is called."""

    def now(self) -> float:
        return time.perf_counter()

    def finish(self) -> None:
        return

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


@final
class EventClock(Clock):
    """Events in the current stream of a CUDA device: the time of its kernels, gaps included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        milliseconds: float = start.elapsed_time(stop)
        return milliseconds / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return EventClock(device) if device.type == "cuda" else WallClock()


__all__ = ["Clock", "EventClock", "WallClock", "clock_of"]
