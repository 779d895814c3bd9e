"""A run in Chrome's trace format, which Perfetto opens: timelines of ranks, steps, and curves as counters.

Perfetto counts nanoseconds, and drops a slice that ends after the one around it: `_nested` cuts such an end.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from .charts import place_text
from .records import Run

MOST_STEPS = 20_000  # the last ones
_MOST_MICROSECONDS = 1e15  # whose nanoseconds have 64 bits
_STEPS, _RANKS = 0, 1  # process ids


def trace_of(run: Run) -> str:
    """JSON. Times are in microseconds since the first event."""
    times = (*run.times[-MOST_STEPS:][:1], *(each.time for each in run.timelines))
    # the differences of clocks are exact to the nanosecond
    base = next(filter(math.isfinite, times), 0.0)
    slices, counters = [*_slices(run, base)], [*_counters(run, base)]
    starts = (each["ts"] for each in (*slices, *counters))
    zero = min(filter(math.isfinite, starts), default=0.0)
    kept = [each for each in slices if _is_time(each["ts"] - zero + each["dur"])]
    marks = [
        each | {"ts": round(each["ts"] - zero, 3)}
        for each in counters
        if _is_time(each["ts"] - zero)
    ]
    events = [*_names(run), *_nested(kept, zero), *marks]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _is_time(microseconds: float) -> bool:
    return 0 <= microseconds < _MOST_MICROSECONDS


def _names(run: Run) -> Iterator[dict[str, Any]]:
    names = [("process_name", _STEPS, 0, "steps of rank 0"), ("thread_name", _STEPS, 0, "steps")]
    names += [("process_name", _RANKS, 0, "ranks, in steps that were timed")]
    widest = max((each.ranks for each in run.timelines), key=len, default=[])
    names += [("thread_name", _RANKS, n, place_text(n, widest)) for n in range(len(widest))]
    for kind, pid, tid, name in names:
        yield {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _slices(run: Run, base: float) -> Iterator[dict[str, Any]]:
    breaks = set(run.breaks)
    first = max(len(run.steps) - MOST_STEPS, 0)
    for at in range(first, len(run.steps)):
        end = 1e6 * (run.times[at] - base)
        begin = end if at == first or at in breaks else min(1e6 * (run.times[at - 1] - base), end)
        where = {"pid": _STEPS, "tid": 0, "ts": begin, "dur": end - begin}
        yield {"ph": "X", "name": f"step {run.steps[at]}", **where}
    for found in run.timelines:
        at = bisect_left(run.steps, found.step)
        is_known = at < len(run.steps) and run.steps[at] == found.step
        end = run.times[at] if is_known else found.time
        for rank, each in enumerate(found.ranks):
            begin = 1e6 * (end - base) - 1e3 * each.milliseconds
            for span in each.spans:
                start, stop = 1e3 * span.start, 1e3 * max(span.start, span.end)
                name = f"{span.name} {span.label}".strip()
                where = {"pid": _RANKS, "tid": rank, "ts": begin + start, "dur": stop - start}
                yield {"ph": "X", "name": name, **where, "args": {"step": found.step}}


def _counters(run: Run, base: float) -> Iterator[dict[str, Any]]:
    for at in range(max(len(run.steps) - MOST_STEPS, 0), len(run.steps)):
        for name, column in (("loss", run.loss), ("norm", run.norms), ("lr", run.rates)):
            if math.isfinite(column[at]):
                where = {"pid": _STEPS, "tid": 0, "ts": 1e6 * (run.times[at] - base)}
                yield {"ph": "C", "name": name, **where, "args": {name: column[at]}}


def _nested(slices: list[dict[str, Any]], zero: float) -> Iterator[dict[str, Any]]:
    """By row and start; each ends within the one around it."""
    rounded = [
        each | {"ts": round(1e3 * (each["ts"] - zero)), "dur": round(1e3 * each["dur"])}
        for each in slices
    ]
    ends: list[int] = []  # of those that are open, in nanoseconds
    row = None
    for each in sorted(
        rounded, key=lambda each: (each["pid"], each["tid"], each["ts"], -each["dur"])
    ):
        start, end = each["ts"], each["ts"] + each["dur"]
        if row != (each["pid"], each["tid"]):
            row, ends = (each["pid"], each["tid"]), []
        while ends and ends[-1] <= start:
            ends.pop()
        ends.append(min([end, *ends[-1:]]))
        yield each | {"ts": start / 1e3, "dur": (ends[-1] - start) / 1e3}


__all__ = ["trace_of"]
