"""Time between two moments of the device that computes, without waiting for it in between."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.device import device_of


class ProfileClock:
    """Takes moments; their distances are asked for at the end.

    Where a device has streams, moments are events in the current one: the time of its kernels, gaps included.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """device: None is the CPU."""
        self._device = device_of(device or torch.device("cpu"))

    def now(self) -> Any:
        """This moment."""
        return self._device.event(timed=True)

    def finish(self) -> None:
        """Wait until the device has passed all moments. Before `seconds`."""
        self._device.synchronize()

    def seconds(self, start: Any, stop: Any) -> float:
        """The time between two moments."""
        elapsed: float = start.elapsed_time(stop) / 1e3
        return elapsed


clock_of = ProfileClock

__all__ = ["ProfileClock", "clock_of"]
