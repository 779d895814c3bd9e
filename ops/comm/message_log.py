"""The log of collectives: the count and the times of each operation and message size, where it is on.

    start ──────── begin of the wait ──────── end of the wait, and of the sum of what was received
      └─────────────────── latency ─────────────────────┘
                           └───────── waited ───────────┘

Computation between the start and the wait is part of the latency. So the latency of a collective that is
overlapped is an upper bound, and its bandwidth a lower one. `waited` is what the collective cost the step.
On a CUDA device the three moments are events on the current stream, so nothing is synchronized.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from .bandwidth import ALIASES, bus_factor, gbps

log = logging.getLogger("xds")

SAMPLES = 1000  # times that are kept of each operation and size, the last ones

Moment = Any
"""Seconds of the host, or an event of a device."""


class Clock(ABC):
    """Moments of one kind, and the time between two."""

    @abstractmethod
    def now(self) -> Moment:
        """This moment."""

    @abstractmethod
    def is_over(self, moment: Moment) -> bool:
        """The device has reached `moment`."""

    @abstractmethod
    def milliseconds(self, start: Moment, end: Moment) -> float:
        """The time between two moments. Waits until the device has reached `end`."""


@final
class HostClock(Clock):
    """Wall-clock time of the host."""

    def now(self) -> Moment:
        return time.perf_counter()

    def is_over(self, moment: Moment) -> bool:
        return True

    def milliseconds(self, start: Moment, end: Moment) -> float:
        return 1e3 * (float(end) - float(start))


@final
class EventClock(Clock):
    """Events on the current stream of a CUDA device."""

    def now(self) -> Moment:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_over(self, moment: Moment) -> bool:
        return bool(moment.query())

    def milliseconds(self, start: Moment, end: Moment) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))


@dataclass(frozen=True)
class LogOptions:
    """Which collectives are logged, and how. Names as in the config's section `comms_logger`."""

    prof_all: bool = True
    prof_ops: Sequence[str] = ()
    verbose: bool = False
    debug: bool = False


@dataclass(frozen=True)
class Key:
    """What one row counts."""

    label: str  # the operation; with `debug` also its subject
    operation: str
    size_bytes: int  # of the whole tensor, see `bus_factor`
    members: tuple[int, ...]  # the ranks that take part, among all ranks


@dataclass
class Row:
    """The collectives of one key since the last reset."""

    count: int = 0
    total_milliseconds: float = 0.0
    waited_milliseconds: float = 0.0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def add(self, milliseconds: float, waited: float) -> None:
        """Count one more."""
        self.count += 1
        self.total_milliseconds += milliseconds
        self.waited_milliseconds += waited
        self.latencies.append(milliseconds)
        self.waits.append(waited)


@final
class Timed:
    """One collective that is being measured."""

    __slots__ = (
        "_log",
        "_start",
        "_wait",
        "is_done",
        "label",
        "members",
        "operation",
        "size_bytes",
    )

    def __init__(
        self, owner: MessageLog, operation: str, label: str, members: tuple[int, ...], size: int
    ) -> None:
        self._log = owner
        self.operation = operation
        self.label = label
        self.members = members
        self.size_bytes = size
        self.is_done = False
        self._start = owner.clock.now()
        self._wait: Moment = None

    def begin_wait(self) -> None:
        """This rank begins to wait. Only the first call counts."""
        if self._wait is None:
            self._wait = self._log.clock.now()

    def end(self) -> None:
        """The collective is complete. Only the first call counts."""
        if not self.is_done:
            self.is_done = True
            key = Key(self.label, self.operation, self.size_bytes, self.members)
            begin = self._start if self._wait is None else self._wait
            self._log.ended(key, self._start, begin)


@final
class MessageLog:
    """The collectives of all groups of one engine on this rank. Off until `configure` turns it on."""

    def __init__(self, rank: int, clock: Clock) -> None:
        """rank: of all ranks; rank 0 writes the lines of `verbose`."""
        self.clock = clock
        self.is_on = False
        self.options = LogOptions()
        self._rank = rank
        self._rows: dict[Key, Row] = {}
        self._pending: deque[tuple[Key, Moment, Moment, Moment]] = deque()

    def configure(self, options: LogOptions, *, enabled: bool) -> None:
        """Log from now on as `options` say; or stop, and keep what was logged."""
        self.options = options
        self.is_on = enabled

    def start(
        self,
        operation: str,
        size_bytes: int,
        members: Sequence[int],
        subject: Callable[[], str],
    ) -> Timed | None:
        """A collective starts now. None: it is not one of those that are logged.

        Args:
            size_bytes: of the whole tensor, see `bus_factor`; the caller may correct it before the end.
            subject: what the collective is of, e.g. "unit 'blocks.5'"; called with `debug` only.
        """
        options = self.options
        if not options.prof_all and operation not in _canonical(options.prof_ops):
            return None
        label = f"{operation} | [{subject()}]" if options.debug else operation
        return Timed(self, operation, label, tuple(members), size_bytes)

    def ended(self, key: Key, start: Moment, begin_wait: Moment) -> None:
        """A collective ends now."""
        self._pending.append((key, start, begin_wait, self.clock.now()))
        self._collect(waits=False)

    def rows(self) -> dict[Key, Row]:
        """What was logged since the last reset, in order of first use. Waits for the device."""
        self._collect(waits=True)
        return dict(self._rows)

    def reset(self) -> None:
        """Forget what was logged."""
        self._pending.clear()
        self._rows.clear()

    def _collect(self, *, waits: bool) -> None:
        while self._pending and (waits or self.clock.is_over(self._pending[0][-1])):
            key, start, begin_wait, end = self._pending.popleft()
            milliseconds = self.clock.milliseconds(start, end)
            row = self._rows.setdefault(key, Row())
            row.add(milliseconds, self.clock.milliseconds(begin_wait, end))
            if self.options.verbose and self._rank == 0:
                log.info("%s", _line(key, milliseconds))


def clock_of(device: torch.device) -> Clock:
    """The clock for collectives of tensors on `device`."""
    return EventClock() if device.type == "cuda" else HostClock()


def _canonical(operations: Sequence[str]) -> set[str]:
    return {ALIASES.get(name, name) for name in operations}


def _line(key: Key, milliseconds: float) -> str:
    speed = gbps(key.size_bytes, milliseconds)
    bus = speed * bus_factor(key.operation, len(key.members))
    return (
        f"comm op: {key.label} | time (ms): {milliseconds:.2f} | msg size: {binary_size(key.size_bytes)} | "
        f"algbw (Gbps): {speed:.2f} | busbw (Gbps): {bus:.2f}"
    )


def binary_size(size_bytes: int) -> str:
    """As DeepSpeed writes sizes: units of 1024, with the prefixes of 1000.

    >>> binary_size(0), binary_size(1536), binary_size(2**20)
    ('0B', '1.5 KB', '1.0 MB')
    """
    if size_bytes == 0:
        return "0B"
    power = min((size_bytes.bit_length() - 1) // 10, 8)
    return f"{round(size_bytes / 1024**power, 2)} {'KMGTPEZY'[power - 1] if power else ''}B"


__all__ = [
    "Clock",
    "EventClock",
    "HostClock",
    "Key",
    "LogOptions",
    "MessageLog",
    "Row",
    "Timed",
    "binary_size",
    "clock_of",
]
