"""A run in Chrome's trace format, which Perfetto opens: timelines of ranks, steps, and curves as counters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from .records import Run

MOST_STEPS = 20_000  # the last ones
_STEPS, _RANKS = 0, 1  # process ids


def trace_of(run: Run) -> str:
    """JSON. Times are in microseconds since the first step that is in it."""
    events = [
        event
        for event in _events(run)
        if math.isfinite(event.get("ts", 0.0) + event.get("dur", 0.0))
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _events(run: Run) -> Iterator[dict[str, Any]]:
    for pid, name in ((_STEPS, "steps of rank 0"), (_RANKS, "ranks, in steps that were timed")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    first = max(len(run.steps) - MOST_STEPS, 0)
    zero = run.times[first] if run.times else 0.0
    breaks = set(run.breaks)
    for at in range(first, len(run.steps)):
        end = 1e6 * (run.times[at] - zero)
        begin = end if at == first or at in breaks else 1e6 * (run.times[at - 1] - zero)
        name = f"step {run.steps[at]}"
        yield {"ph": "X", "name": name, "pid": _STEPS, "tid": 0, "ts": begin, "dur": end - begin}
        for counter, column in (("loss", run.loss), ("norm", run.norms), ("lr", run.rates)):
            if math.isfinite(column[at]):
                args = {counter: column[at]}
                yield {"ph": "C", "name": counter, "pid": _STEPS, "ts": end, "args": args}
    for found in run.timelines:
        for rank, each in enumerate(found.ranks):
            begin = 1e6 * (found.time - zero) - 1e3 * each.milliseconds
            for span in each.spans:
                start, dur = begin + 1e3 * span.start, 1e3 * (span.end - span.start)
                name = f"{span.name} {span.label}".strip()
                where = {"pid": _RANKS, "tid": rank, "ts": start, "dur": dur}
                yield {"ph": "X", "name": name, **where, "args": {"step": found.step}}


__all__ = ["trace_of"]
