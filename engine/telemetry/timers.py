"""Measures a step: time in named regions, samples per second, memory in use.

A measurement that is not enabled costs almost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

import torch

from ...ops.device import device_of

Clock = Callable[[], float]
"""Seconds since some fixed moment."""

_NUM_WARMUP_STEPS = 2  # the first steps allocate, compile and gather for the first time


# ---- regions: forward, backward, reduce, step ----------------------------------------------------


@final
class Timers:
    """Wall-clock time of regions; synchronizes the device at both ends of each region.

    With the synchronization a region's time includes its device work. It slows the step down: computation
    and communication no longer overlap across the edges of a region. The time of a region inside another one is
    not the outer one's.

    listener: gets the name of each region that ends, and its seconds.
    """

    listener: Callable[[str, float], None] | None = None

    def __init__(
        self, device: torch.device, *, enabled: bool, clock: Clock = time.perf_counter
    ) -> None:
        self.enabled = enabled
        self._device = device
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._inner = [0.0]  # seconds in regions inside, for each region that is open
        self._nothing = nullcontext()

    def region(self, name: str) -> AbstractContextManager[None]:
        """Add the time inside the `with` block to `name`."""
        return _Region(self, name) if self.enabled else self._nothing

    def take_milliseconds(self) -> dict[str, float]:
        """Return the time in each region since the last call, in order of first use, and reset it."""
        milliseconds = {name: 1e3 * seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return milliseconds

    def last_milliseconds(self) -> dict[str, float]:
        """The time of the last visit of each region."""
        return {name: 1e3 * seconds for name, seconds in self._last.items()}

    def now(self) -> float:
        """The time in seconds, after the device has finished all queued work."""
        device_of(self._device).synchronize()
        return self._clock()

    def open(self) -> float:
        """A region begins. Returns `now`."""
        self._inner.append(0.0)
        return self.now()

    def close(self, name: str, start_seconds: float) -> None:
        """The region that began last ends."""
        seconds = self.now() - start_seconds
        own = seconds - self._inner.pop()
        self._inner[-1] += seconds
        self._seconds[name] = self._seconds.get(name, 0.0) + own
        self._last[name] = own
        if self.listener is not None:
            self.listener(name, own)


@final
class _Region(AbstractContextManager[None]):
    def __init__(self, timers: Timers, name: str) -> None:
        self._timers = timers
        self._name = name
        self._start_seconds = 0.0

    def __enter__(self) -> None:
        self._start_seconds = self._timers.open()

    def __exit__(self, *exception: object) -> None:
        self._timers.close(self._name, self._start_seconds)


# ---- regions under DeepSpeed's names -------------------------------------------------------------

EVENT_NAMES = {
    "fwd": "forward",
    "bwd": "backward",
    "bwd_inner": "backward_inner",
    "bwd_allreduce": "backward_allreduce",
    "step": "step",
}
"""The names of monitor events."""


def breakdown(milliseconds: Mapping[str, float]) -> dict[str, float]:
    """The five times, in DeepSpeed's order, of a region's times; {} of none.

    forward ───> fwd
    backward ──> bwd_inner ─────┐
    reduce ────> bwd_allreduce ─┴─> bwd     waits for the last gradients; within step(), before the update
    step ──────> step                       the update alone

    >>> breakdown({"forward": 1.0, "backward": 2.0, "reduce": 0.5, "step": 0.25})
    {'fwd': 1.0, 'bwd': 2.5, 'bwd_inner': 2.0, 'bwd_allreduce': 0.5, 'step': 0.25}
    """
    if not milliseconds:
        return {}
    forward, backward, reduce, step = (
        milliseconds.get(name, 0.0) for name in ("forward", "backward", "reduce", "step")
    )
    return {
        "fwd": forward,
        "bwd": backward + reduce,
        "bwd_inner": backward,
        "bwd_allreduce": reduce,
        "step": step,
    }


def times_line(milliseconds: Mapping[str, float], suffix: str = "") -> str:
    """ "time (ms) | fwd: 1.00 | bwd: 2.50"; `suffix` is added to each name."""
    parts = [f"{name}{suffix}: {value:.2f}" for name, value in milliseconds.items()]
    return " | ".join(["time (ms)", *parts])


# ---- throughput ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Samples per second: since the previous reading, and since warm-up ended."""

    last: float
    overall: float


@final
class Throughput:
    """Samples per second of a job. Reads the clock only in `read`: a step costs two additions.

    listener: called at the end of each step that is counted.
    """

    listener: Callable[[], None] | None = None

    def __init__(
        self,
        device: torch.device,
        *,
        enabled: bool,
        synchronized: bool,
        clock: Clock = time.perf_counter,
    ) -> None:
        """synchronized: wait for the device before reading the clock (once per reading, not per step)."""
        self._enabled = enabled
        self._device = device
        self._synchronized = synchronized
        self._clock = clock
        self._num_steps = 0
        self._num_samples = 0
        self._start_seconds = 0.0
        self._read_seconds = 0.0
        self._read_samples = 0
        self._rates: Rates | None = None

    def step(self, num_samples: int) -> None:
        """Count one optimizer step with `num_samples` samples over all ranks."""
        if not self._enabled:
            return
        if self.listener is not None:
            self.listener()
        self._num_steps += 1
        if self._num_steps > _NUM_WARMUP_STEPS:
            self._num_samples += num_samples
        elif self._num_steps == _NUM_WARMUP_STEPS:
            self._start_seconds = self._read_seconds = self._now()

    def read(self) -> Rates | None:
        """The rates so far; None when disabled, and during the first two steps, which do not count.

        `last` covers all steps since the previous reading.
        """
        if self._num_samples == self._read_samples:
            return self._rates  # no step since the last reading
        now = self._now()
        self._rates = Rates(
            last=_rate(self._num_samples - self._read_samples, now - self._read_seconds),
            overall=_rate(self._num_samples, now - self._start_seconds),
        )
        self._read_seconds, self._read_samples = now, self._num_samples
        return self._rates

    def _now(self) -> float:
        if self._synchronized:
            device_of(self._device).synchronize()
        return self._clock()


def _rate(num_samples: int, seconds: float) -> float:
    return num_samples / seconds if seconds > 0 else float("inf")
