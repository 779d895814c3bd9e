"""The summary of an engine's collectives: counts, times and bandwidths, and what slow ranks cost the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import all_gather_json
from ...ops.comm.message_log import Key, Row, binary_size, bus_factor, gbps, trimmed_mean

_COMPARED = 200  # times of each row that ranks send each other
_WIDTH = 20


@dataclass(frozen=True)
class CommsRow:
    """The collectives of one operation and size. Averages leave out the extreme tenths of the times.

    operation: with `debug` of the config also what it was of. num_ranks: of its group.
    waited: the part of the time in which this rank did nothing but wait. Bandwidths are in 10^9 bits/s.
    """

    operation: str
    size_bytes: int
    num_ranks: int
    count: int
    total_milliseconds: float
    average_milliseconds: float
    waited_milliseconds: float
    algorithm_gbps: float
    bus_gbps: float


@dataclass(frozen=True)
class StragglerRow:
    """How this rank's waits in one operation and size compare with the shortest of its group.

    The rank that comes last waits for the messages alone: its wait is taken for the time of the collective.
    What this rank waited longer is the straggler's. Both are of the last `count` collectives.
    """

    operation: str
    size_bytes: int
    count: int
    total_milliseconds: float
    straggler_milliseconds: float
    average_milliseconds: float
    average_straggler_milliseconds: float


@final
@dataclass(frozen=True)
class CommsSummary:
    """What this rank's log of collectives has; `print` shows it as a table.

    stragglers: None where ranks were not compared.
    """

    rows: tuple[CommsRow, ...]
    stragglers: tuple[StragglerRow, ...] | None = None

    def __str__(self) -> str:
        lines = [
            _cells("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)")
            + _cells("tput_avg (Gbps)", "busbw_avg (Gbps)", "Avg Wait(ms)")
        ]
        for row in _titled(self.rows, lines):
            times = row.total_milliseconds, row.average_milliseconds
            speeds = row.algorithm_gbps, row.bus_gbps, row.waited_milliseconds
            lines.append(_line(row.size_bytes, row.count, *times, *speeds))
        if self.stragglers is not None:
            lines += [
                "Breakdown with straggler effect",
                _cells("Comm. Op", "Message Size", "Count", "Total comm lat(ms)")
                + _cells("Total straggler(ms)", "Avg comm lat(ms)", "Avg straggler(ms)"),
            ]
            for each in _titled(self.stragglers, lines):
                totals = each.total_milliseconds, each.straggler_milliseconds
                averages = each.average_milliseconds, each.average_straggler_milliseconds
                lines.append(_line(each.size_bytes, each.count, *totals, *averages))
        return "\n".join(line.rstrip() for line in lines)


def summary_of(collectives: Collectives, *, show_straggler: bool = False) -> CommsSummary:
    """The summary of the engine whose collectives of all ranks are these.

    show_straggler: compare this rank's waits with those of its peers; then a collective.
    """
    found = collectives.message_log.rows()
    ordered = sorted(found, key=lambda key: (key.label, key.size_bytes, key.members))
    rows = tuple(_row(key, found[key]) for key in ordered)
    if not show_straggler:
        return CommsSummary(rows)
    mine = [_times(key, found[key]) for key in ordered]
    table = all_gather_json(collectives, mine, "the times of collectives")
    compared = zip(ordered, _least_waits(mine, table), strict=True)
    return CommsSummary(rows, tuple(_straggler(key, found[key], least) for key, least in compared))


def _row(key: Key, row: Row) -> CommsRow:
    average = trimmed_mean(row.latencies)
    speed = gbps(key.size_bytes, average)
    num_ranks = len(key.members)
    return CommsRow(
        operation=key.label,
        size_bytes=key.size_bytes,
        num_ranks=num_ranks,
        count=row.count,
        total_milliseconds=row.total_milliseconds,
        average_milliseconds=average,
        waited_milliseconds=trimmed_mean(row.waits),
        algorithm_gbps=speed,
        bus_gbps=speed * bus_factor(key.operation, num_ranks),
    )


def _times(key: Key, row: Row) -> list[Any]:
    """JSON: the key, how many collectives there were, and the last waits."""
    waits = islice(reversed(row.waits), _COMPARED)
    of_message = "message" if key.operation in ("send", "receive") else key.label
    name = [of_message, key.size_bytes, *key.members]
    return [name, row.count, [float(f"{wait:.4g}") for wait in waits]]


def _least_waits(mine: Sequence[list[Any]], table: Sequence[list[list[Any]]]) -> list[list[float]]:
    """For each of this rank's rows the shortest waits among the ranks that have it, the last one first."""
    by_name: dict[str, list[list[float]]] = {}
    for of_rank in table:
        for name, count, waits in of_rank:
            by_name.setdefault(f"{name} {count}", []).append(waits)
    return [
        [min(of_call) for of_call in zip(*by_name[f"{name} {count}"], strict=False)]
        for name, count, _ in mine
    ]


def _straggler(key: Key, row: Row, least: Sequence[float]) -> StragglerRow:
    lost = [max(own - of_all, 0.0) for own, of_all in zip(reversed(row.waits), least, strict=False)]
    return StragglerRow(
        operation=key.label,
        size_bytes=key.size_bytes,
        count=len(lost),
        total_milliseconds=sum(least),
        straggler_milliseconds=sum(lost),
        average_milliseconds=trimmed_mean(least),
        average_straggler_milliseconds=trimmed_mean(lost),
    )


def _titled(rows: Sequence[Any], lines: list[str]) -> Iterable[Any]:
    """The rows; before the first one of an operation, its name becomes a line."""
    last = None
    for row in rows:
        if row.operation != last:
            last = row.operation
            lines.append(last)
        yield row


def _line(size_bytes: int, count: int, *numbers: float) -> str:
    return _cells("", binary_size(size_bytes), str(count), *(f"{each:.2f}" for each in numbers))


def _cells(*texts: str) -> str:
    return "".join(text.ljust(_WIDTH) for text in texts)


__all__ = [
    "CommsRow",
    "CommsSummary",
    "StragglerRow",
    "summary_of",
    "trimmed_mean",
]
