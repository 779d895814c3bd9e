"""Time between two moments of the device that computes, without waiting for it in between."""

from __future__ import annotations

import time
from typing import Any

import torch


class ProfileClock:
    """Takes moments; their distances are asked for at the end.

    On a CUDA device moments are events in its current stream: the time of its kernels, gaps included. A CPU
    computes when it is called.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """device: None is the CPU."""
        self._device = device if device is not None and device.type == "cuda" else None

    def now(self) -> Any:
        """This moment."""
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def finish(self) -> None:
        """Wait until the device has passed all moments. Before `seconds`."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def seconds(self, start: Any, stop: Any) -> float:
        """The time between two moments."""
        elapsed: float = stop - start if self._device is None else start.elapsed_time(stop) / 1e3
        return elapsed


clock_of = ProfileClock

__all__ = ["ProfileClock", "clock_of"]
