"""Section --memory: peaks against the plan, fragmentation, and the largest model that trains."""

from __future__ import annotations

import time
from typing import Any

from scale import STATE_BYTES, sequences, shape_of
from session import Failed, Session

from harness import Row  # isort: skip
from offload.search import next_layers  # isort: skip

MAX_LAYERS = 200
BUILD_SECONDS = 120.0
NO_MEMORY = ("memory", "alloc_failed")  # torch's words, and those of cuBLAS


def run(session: Session) -> None:
    """All rows."""
    found = session.measure_rate()
    for size in session.options.models or (["350M"] if session.small else ["350M", "1.3B"]):
        against_plan(session, size, found["total"])
    for kind in ("xds-3", "plain"):
        largest(session, kind, found["total"])


def _build(session: Session, kind: str, size: str, count: int) -> Any:
    child = session.child()
    limit = min(session.deadline, time.monotonic() + BUILD_SECONDS)
    child.ask("build", limit, size=size, kind=kind, sequences=count)
    return child


def against_plan(session: Session, size: str, total: int) -> None:
    """Peaks of stages 0 to 3 over `memory_plan()` and the plain loop's activations."""
    count = sequences(size, total)
    try:
        plain = _build(session, "plain", size, count)
        extra = plain.ask("activations", session.deadline)["activations"]
        base = plain.ask("memory", session.deadline)
        plain.end()
    except Failed as error:
        session.skip(f"{size}: peak / plan", f"the plain loop failed: {error}", 1.05, aim=1.02)
        return
    session.add(
        Row(
            f"{size} plain: allocated peak",
            base["allocated"] / 1e9,
            unit=" GB",
            note=f"activations {extra / 1e9:.2f} GB",
        )
    )
    for stage in (0, 3) if session.small else range(4):
        name = f"{size} stage {stage}: allocated peak / (plan + activations)"
        if session.left < (3 if session.small else 30):
            session.skip(name, "time", 1.05, aim=1.02)
            continue
        try:
            child = _build(session, f"xds-{stage}", size, count)
            peaks = child.ask("memory", session.deadline)
            child.end()
        except Failed as error:
            session.skip(name, str(error), 1.05, aim=1.02)
            continue
        planned = peaks["plan"] + extra
        note = f"{peaks['allocated'] / 1e9:.2f} GB of {planned / 1e9:.2f} GB"
        session.add(
            Row(name, peaks["allocated"] / planned, must=1.05, aim=1.02, note=note),
            Row(
                f"{size} stage {stage}: reserved / allocated peak",
                peaks["reserved"] / max(1, peaks["allocated"]),
                note="fragmentation and the allocator's spare blocks",
            ),
        )


def largest(session: Session, kind: str, total: int) -> None:
    """The most layers of width 4096 that take three steps: one sequence, recomputed."""
    name = f"largest GPT, {kind}, 1 x 2,048 tokens, recomputed"
    limit = 2 if session.small else MAX_LAYERS
    one, two = (shape_of(f"wide-{n}", small=session.small).numel for n in (1, 2))
    room = 0.92 * total / STATE_BYTES - one
    first = limit // 2 if session.small else max(1, min(limit, 1 + int(room / (two - one))))
    tried: dict[int, bool] = {}
    why = "the search ended"
    while (layers := next_layers(tried, first, limit)) is not None:
        if session.left < (2 if session.small else 40):
            why = "time"
            break
        try:
            _build(session, kind, f"wide-{layers}", 1).end()
            tried[layers] = True
        except Failed as error:
            if not any(word in str(error).lower() for word in NO_MEMORY):
                why = str(error)
                break
            tried[layers] = False
        print(f"# {kind}, {layers} layers: {'trains' if tried[layers] else 'too large'}")
    good = max((n for n, trains in tried.items() if trains), default=0)
    if not good:
        session.skip(name, why)
        return
    numel = shape_of(f"wide-{good}", small=session.small).numel
    session.add(Row(name, numel / 1e9, unit="e9", note=f"{good} layers; {why}"))
