"""Where the time and the memory of a step go: named regions, samples per second, bytes in use.

Each has an object that does nothing for a config that leaves it off, so that the engine holds no
conditions and a step that nobody watches pays next to nothing.
"""

from __future__ import annotations

import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import torch

Clock = Callable[[], float]
"""Seconds since some fixed moment."""

_NUM_WARMUP_STEPS = 2  # the first steps allocate, compile and gather for the first time


class ThroughputSection(Protocol):
    """The config's `timers.throughput` section."""

    @property
    def enabled(self) -> bool: ...

    @property
    def synchronized(self) -> bool: ...


class TimersSection(Protocol):
    """The config's `timers` section."""

    @property
    def throughput(self) -> ThroughputSection: ...


class TimersConfig(Protocol):
    """What `build_timers` and `build_throughput` read of a config."""

    @property
    def wall_clock_breakdown(self) -> bool: ...

    @property
    def timers(self) -> TimersSection: ...


# ---- regions: forward, backward, reduce, step ----------------------------------------------------


class Timers(ABC):
    """Time spent in named regions of a step."""

    @property
    @abstractmethod
    def enabled(self) -> bool:
        """False where nothing is measured."""

    @abstractmethod
    def region(self, name: str) -> AbstractContextManager[None]:
        """Add the time inside the `with` block to `name`."""

    @abstractmethod
    def take_milliseconds(self) -> dict[str, float]:
        """Time in each region since the last call, in order of first use; goes back to zero."""


@final
class NoTimers(Timers):
    """Measures nothing."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    @property
    def enabled(self) -> bool:
        return False

    def region(self, name: str) -> AbstractContextManager[None]:
        return self._nothing

    def take_milliseconds(self) -> dict[str, float]:
        return {}


@final
class RegionTimers(Timers):
    """Wall-clock time of regions; waits for a CUDA device at both ends of each.

    The waiting makes the times those of the work itself, and the step slower: computation and
    communication no longer overlap across the edge of a region.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @property
    def enabled(self) -> bool:
        return True

    def region(self, name: str) -> AbstractContextManager[None]:
        return _Region(self, name)

    def take_milliseconds(self) -> dict[str, float]:
        milliseconds = {name: 1e3 * seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return milliseconds

    def now(self) -> float:
        """Seconds, once the device has done all that it was given."""
        _synchronize(self._device)
        return self._clock()

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


@final
class _Region(AbstractContextManager[None]):
    def __init__(self, timers: RegionTimers, name: str) -> None:
        self._timers = timers
        self._name = name
        self._start_seconds = 0.0

    def __enter__(self) -> None:
        self._start_seconds = self._timers.now()

    def __exit__(self, *exception: object) -> None:
        self._timers.add(self._name, self._timers.now() - self._start_seconds)


def build_timers(config: TimersConfig, device: torch.device) -> Timers:
    """Region timers if `wall_clock_breakdown` is on."""
    return RegionTimers(device) if config.wall_clock_breakdown else NoTimers()


# ---- throughput ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Samples per second: since the reading before, and since warm-up ended."""

    last: float
    overall: float


class Throughput(ABC):
    """Samples per second of a job."""

    @abstractmethod
    def step(self, num_samples: int) -> None:
        """One optimizer step has gone by, with `num_samples` samples over all ranks."""

    @abstractmethod
    def read(self) -> Rates | None:
        """The rates up to now; None when off, and in the first two steps, which do not count.

        Read after each step, `last` is that step's rate; read every 10 steps, that of the 10.
        """


@final
class NoThroughput(Throughput):
    """Measures nothing."""

    def step(self, num_samples: int) -> None:
        pass

    def read(self) -> Rates | None:
        return None


@final
class SampleThroughput(Throughput):
    """Counts samples, and looks at the clock only when read: a step costs two additions.

    Args:
        synchronized: wait for a CUDA device before looking at the clock (once a reading, not once
            a step), so that work that was only queued is not counted as done.
    """

    def __init__(
        self, device: torch.device, *, synchronized: bool, clock: Clock = time.perf_counter
    ) -> None:
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
        self._num_steps += 1
        if self._num_steps > _NUM_WARMUP_STEPS:
            self._num_samples += num_samples
        elif self._num_steps == _NUM_WARMUP_STEPS:
            self._start_seconds = self._read_seconds = self._now()

    def read(self) -> Rates | None:
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
            _synchronize(self._device)
        return self._clock()


def build_throughput(config: TimersConfig, device: torch.device) -> Throughput:
    """A sample counter unless `timers.throughput.enabled` is off."""
    section = config.timers.throughput
    if not section.enabled:
        return NoThroughput()
    return SampleThroughput(device, synchronized=section.synchronized)


# ---- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use now and at most so far: tensors of a CUDA device, or the process on a CPU."""

    now_bytes: int
    peak_bytes: int


def memory_use(device: torch.device) -> MemoryUse:
    """Memory that this process uses on `device`."""
    if device.type == "cuda":
        return MemoryUse(
            torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        )
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # no /proc: the peak is all that is known
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
        return MemoryUse(peak_bytes, peak_bytes)
    # not ru_maxrss here: a child starts with its parent's
    kib = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return MemoryUse(int(kib["VmRSS"]) * 1024, int(kib["VmHWM"]) * 1024)


def _rate(num_samples: int, seconds: float) -> float:
    return num_samples / seconds if seconds > 0 else float("inf")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
