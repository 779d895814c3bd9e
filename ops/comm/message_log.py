"""Counts the bytes that a rank sends, and logs the times of its collectives where that is on.

    start ──────── begin of the wait ──────── end of the wait, and of the sum of what was received
      └─────────────────── latency ─────────────────────┘
                           └───────── waited ───────────┘

Computation between the start and the wait is part of the latency. So the latency of an overlapped collective
is an upper bound, and its bandwidth is a lower bound. `waited` is what the collective cost the step. On a
device with streams the three moments are events on the current stream, so nothing is synchronized.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from ..device import device_of

log = logging.getLogger("xds")

SAMPLES = 1000  # the number of latest times that are kept for each row

_OTHERS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_WHOLE = ("broadcast", "reduce", "send", "receive", "barrier")

# the names of other libraries for the same operations
ALIASES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "all_gather_object": "all_gather",
    "allgather_fn": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_fn": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_reduce_coalesced": "all_reduce",
    "inference_all_reduce": "all_reduce",
    "broadcast_object_list": "broadcast",
    "monitored_barrier": "barrier",
    "isend": "send",
    "recv": "receive",
    "irecv": "receive",
    "batch_isend_irecv": "send",
}
TRIMMED = 0.1  # the part of measured times that an average leaves out, at each end
OPERATIONS = ("all_reduce", *_OTHERS, *_WHOLE)


@final
class Traffic:
    """The bytes that one rank sends to the ranks of a group. A group of one rank has none.

    Attributes:
        sent_bytes: By kind.
        sent_across_bytes: Those to other hosts, by kind, once `is_across` is known.
        exact_bytes: By kind, those that compressed messages stand for.
        is_across: For each rank of the group, whether it is on another host; None if that is not known.
        counted_as: The kind of all bytes from now on; "" for the kind of each message.
    """

    def __init__(self, world_size: int, num_near: int | None = None) -> None:
        """num_near: How many of the other ranks are on this host, if every message is to be counted as if all
        other ranks got an equal part of it. None counts each message by its receivers.
        """
        self._num_others = world_size - 1
        self._num_near = num_near
        self.sent_bytes: dict[str, int] = {}
        self.sent_across_bytes: dict[str, int] = {}
        self.exact_bytes: dict[str, int] = {}
        self.is_across: list[bool] | None = None
        self.counted_as = ""

    def add_to_all(self, kind: str, sent_bytes: int) -> None:
        """Count bytes of which each other rank gets the same number."""
        if self._num_near is not None:
            near_bytes = sent_bytes * self._num_near // max(self._num_others, 1)
            self.add(kind, sent_bytes, sent_bytes - near_bytes)
        elif self._num_others:
            is_across = self.is_across
            num_across = 0 if is_across is None else sum(is_across)
            self.add(kind, sent_bytes, sent_bytes * num_across // self._num_others)

    def add_to(self, kind: str, sent_bytes: int, peer: int) -> None:
        """Count bytes to the rank `peer` of the group."""
        if self._num_near is not None:
            self.add_to_all(kind, sent_bytes)
        else:
            is_across = self.is_across is not None and self.is_across[peer]
            self.add(kind, sent_bytes, sent_bytes if is_across else 0)

    def add(self, kind: str, sent_bytes: int, across_bytes: int) -> None:
        """Count bytes, of which `across_bytes` go to other hosts."""
        kind = self.counted_as or kind
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent_bytes
        if self.is_across is not None or self._num_near is not None:
            self.sent_across_bytes[kind] = self.sent_across_bytes.get(kind, 0) + across_bytes

    def add_exact(self, kind: str, exact_bytes: int) -> None:
        """Count bytes that a compressed message stands for."""
        self.exact_bytes[kind] = self.exact_bytes.get(kind, 0) + exact_bytes


Moment = Any
"""An event of a device."""


class Clock:
    """Takes moments of one device, and measures the time between two of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)

    def now(self) -> Moment:
        """The current moment."""
        return self._device.event(timed=True)

    def is_over(self, moment: Moment) -> bool:
        """Whether the device has reached `moment`."""
        return bool(moment.query())

    def milliseconds(self, start: Moment, end: Moment) -> float:
        """The time between two moments. Waits until the device has reached `end`."""
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
    """What the collectives of one row have in common."""

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
        """Count one more collective."""
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
        """Record that this rank begins to wait. Only the first call counts."""
        if self._wait is None:
            self._wait = self._log.clock.now()

    def end(self) -> None:
        """Record that the collective is complete. Only the first call counts."""
        if not self.is_done:
            self.is_done = True
            key = Key(self.label, self.operation, self.size_bytes, self.members)
            begin = self._start if self._wait is None else self._wait
            self._log.ended(key, self._start, begin)


@final
class MessageLog:
    """The collectives of all groups of one engine on this rank. Off until `configure` turns it on."""

    def __init__(self, rank: int, clock: Clock) -> None:
        """rank: The number in the job. Rank 0 writes the lines of `verbose`."""
        self.clock = clock
        self.is_on = False
        self.options = LogOptions()
        self._rank = rank
        self._rows: dict[Key, Row] = {}
        self._pending: deque[tuple[Key, Moment, Moment, Moment]] = deque()

    def configure(self, options: LogOptions, *, enabled: bool) -> None:
        """Log as `options` say from now on. `enabled=False` stops, and keeps what was logged."""
        self.options = options
        self.is_on = enabled

    def start(
        self,
        operation: str,
        size_bytes: int,
        members: Sequence[int],
        subject: str,
    ) -> Timed | None:
        """Start to measure a collective. Returns None if the log leaves it out.

        Args:
            size_bytes: Of the whole tensor, see `bus_factor`.
            subject: What the collective is of, e.g. "unit 'blocks.5'". It is used with `debug` only.
        """
        options = self.options
        if not options.prof_all and operation not in _canonical(options.prof_ops):
            return None
        label = f"{operation} | [{subject}]" if options.debug else operation
        return Timed(self, operation, label, tuple(members), size_bytes)

    def ended(self, key: Key, start: Moment, begin_wait: Moment) -> None:
        """Record that a collective has ended now."""
        self._pending.append((key, start, begin_wait, self.clock.now()))
        self._collect(waits=False)

    def rows(self) -> dict[Key, Row]:
        """The rows since the last reset, in order of first use. Waits for the device."""
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


# -- bandwidths, as NVIDIA's nccl-tests define them (doc/PERFORMANCE.md there) -------------------------------
#
#    algorithm bandwidth   size / time: how fast the call seems to its caller
#    bus bandwidth         algorithm bandwidth * factor: how fast each link carries bytes


def bus_factor(operation: str, world_size: int) -> float:
    """The bytes that each rank must send, over the size of the operation.

    The size is that of the whole tensor: what all_gather and gather return, what reduce_scatter and scatter
    take, all parts of all_to_all on one rank.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)

    Raises KeyError: `operation` is none of `OPERATIONS` and `ALIASES`.
    """
    operation = ALIASES.get(operation, operation)
    if operation == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if operation in _OTHERS:
        return (world_size - 1) / world_size
    if operation in _WHOLE:
        return 1.0
    raise KeyError(operation)


def gbps(size_bytes: float, milliseconds: float) -> float:
    """Gigabits (10^9) per second; 0 where no time was measured."""
    return size_bytes * 8e-6 / milliseconds if milliseconds > 0 else 0.0


def trimmed_mean(values: Iterable[float]) -> float:
    """The mean without the least and the greatest tenth of the values; 0 of none.

    >>> trimmed_mean([3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 90.0])
    2.125
    """
    ordered = sorted(values)
    cut = round(len(ordered) * TRIMMED)
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept) if kept else 0.0


__all__ = [
    "ALIASES",
    "OPERATIONS",
    "Clock",
    "Key",
    "LogOptions",
    "MessageLog",
    "Row",
    "Timed",
    "Traffic",
    "binary_size",
    "bus_factor",
    "gbps",
    "trimmed_mean",
]
