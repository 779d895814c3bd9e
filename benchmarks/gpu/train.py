"""Section --train: tokens a second of a plain loop, of xds and of DeepSpeed, each pair taking turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scale import FULL, STATE_BYTES, sequences, shape_of
from session import Child, Failed, Session, unlocked_extensions

from harness import Row, ratio_row  # isort: skip

ROUNDS, STEPS = 7, 4
BUILD_SECONDS = 200.0  # with compilation; a process that hangs does not take the whole section
DEEPSPEED_FAILURES = 2  # after these it is not tried again


@dataclass(frozen=True)
class Pair:
    """`ours` relative to `theirs`, in one model; `must` and `aim` are ratios of step times."""

    size: str
    ours: str
    theirs: str
    compiled: bool
    must: float | None = None
    aim: float | None = None

    @property
    def name(self) -> str:
        how = "compiled" if self.compiled else "eager"
        return f"{self.size} {how}: {self.ours} / {self.theirs}"


def pairs(sizes: list[str], peers: list[str], *, deepspeed: bool, few: bool) -> Iterator[Pair]:
    """All comparisons, the important ones first; those with DeepSpeed last, for it may have to compile."""
    if "plain" in peers:
        yield from _plain_pairs(sizes, few)
    for size in sizes if "deepspeed" in peers else ():
        if size == "350M" or (deepspeed and size != "6.7B"):
            for stage in (2, 3) if few else (2, 3, 1):
                bars = (0.90, 0.75) if size == "350M" else (None, None)
                yield Pair(size, f"xds-{stage}", f"deepspeed-{stage}", False, *bars)


def _plain_pairs(sizes: list[str], few: bool) -> Iterator[Pair]:
    for size in sizes:
        if size == "6.7B":
            yield Pair(size, "xds-3", "plain", False)
            continue
        for compiled in (True, False) if size == "1.3B" else (False, True):
            must, aim = (1.02, 1.0) if compiled else (1.0, 0.95)
            some = (2, 3) if compiled else (2, 0, 3)
            for stage in some if few else (2, 0, 1, 3):
                bars = (must, aim) if stage < 3 and size == "350M" else (None, None)
                yield Pair(size, f"xds-{stage}", "plain", compiled, *bars)


class Section:
    """Runs the pairs; the plain loop of a group of pairs stays alive between them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        found = session.measure_rate()
        self.flops, self.total = found["flops"], found["total"]
        self.rounds, self.steps = (2, 1) if session.small else (ROUNDS, STEPS)
        self._peer: tuple[tuple[str, str, bool], Child] | None = None
        self._own_adam = not session.small  # of DeepSpeed; it takes a minute to compile
        self._losses: dict[str, list[float]] = {}  # of each size's first contestant

    def run(self) -> None:
        few = self.session.small
        sizes = self.session.options.models or (
            ["350M", "6.7B"] if few else ["350M", "1.3B", "125M", "6.7B"]
        )
        folder = self.session.options.deepspeed
        failed: dict[Any, str] = {}
        deepspeed: list[str] = []  # its failures
        for pair in pairs(sizes, self.session.options.against, deepspeed=bool(folder), few=few):
            key = (pair.size, pair.theirs, pair.compiled)
            reason = failed.get(key) or self._reason(pair, folder)
            if pair.theirs.startswith("deepspeed") and len(deepspeed) >= DEEPSPEED_FAILURES:
                reason = reason or f"DeepSpeed failed: {deepspeed[-1]}"
            if reason:
                self.session.skip(pair.name, reason, pair.must, aim=pair.aim)
                continue
            try:
                self._run(pair)
            except Failed as error:
                self.session.skip(pair.name, str(error), pair.must, aim=pair.aim)
                if self._peer is None or not self._peer[1].is_alive:
                    failed[key] = f"the peer failed: {error}"
                if self._peer is None and pair.theirs.startswith("deepspeed"):
                    deepspeed.append(str(error))
        self.session.end()

    def _reason(self, pair: Pair, folder: Any) -> str:
        """Why a pair cannot run; empty if it can."""
        if pair.theirs.startswith("deepspeed") and not folder:
            return "no --deepspeed FOLDER"
        if self.session.left < (5 if self.session.small else 45):
            return "time: run --train --models " + pair.size
        numel = shape_of(pair.size, small=self.session.small).numel
        need = 1.15 * STATE_BYTES * numel
        if not self.session.small and need > self.total:
            return f"the states and room for a step take {need / 1e9:.0f} GB"
        return ""

    def _run(self, pair: Pair) -> None:
        alone = pair.size == "6.7B"  # two of them do not fit: one after the other
        if alone:
            self._run_apart(pair)
            return
        theirs = self._theirs(pair)
        ours = self._build(pair, pair.ours)
        try:
            a: list[dict[str, Any]] = []
            b: list[dict[str, Any]] = []
            for turn in range(self.rounds):
                who = [(ours, a), (theirs, b)]
                for child, kept in who if turn % 2 else reversed(who):
                    kept.append(self._turn(child))
            self._compare(pair, a, b)
            self._report(pair, pair.ours, a, ours)
            self._report(pair, pair.theirs, b, theirs)
        finally:
            ours.end()

    def _run_apart(self, pair: Pair) -> None:
        """One after the other, for two do not fit. Either may fail."""
        self._drop_peer()
        found: list[list[dict[str, Any]]] = []
        for who in (pair.ours, pair.theirs):
            try:
                child = self._build(pair, who)
                turns = [self._turn(child) for _ in range(self.rounds)]
                self._report(pair, who, turns, child)
                child.end()
                found.append(turns)
            except Failed as error:
                self.session.skip(f"{pair.size} {who}", str(error))
        if len(found) == 2:
            self._compare(pair, *found)
        else:
            self.session.skip(pair.name, "one of the two failed")

    def _compare(self, pair: Pair, a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
        """The row of a pair: the median of the ratios of neighbouring turns."""
        ours, theirs = ([turn["seconds"] for turn in turns] for turns in (a, b))
        row = ratio_row(pair.name, ours, theirs, must=pair.must, aim=pair.aim)
        ms = [1e3 * statistics.median(found) for found in (ours, theirs)]
        apart = "; not alternated" if pair.size == "6.7B" else ""
        if pair.theirs.startswith("deepspeed"):
            apart += "; with its own Adam" if self._own_adam else "; with torch's fused Adam"
        row.note = f"{ms[0]:.1f} / {ms[1]:.1f} ms{apart}"
        row.samples = {"ours": ours, "theirs": theirs}
        self.session.add(row)

    def _turn(self, child: Child) -> dict[str, Any]:
        return child.ask("turn", self.session.deadline, steps=self.steps)

    def _report(self, pair: Pair, who: str, turns: list[dict[str, Any]], child: Child) -> None:
        """The absolute figures of a contestant, once."""
        how = "compiled" if pair.compiled else "eager"
        name = f"{pair.size} {how} {who}: share of the matrix rate"
        if any(row.name == name for row in self.session.rows):
            return
        shape = shape_of(pair.size, small=self.session.small)
        tokens = sequences(pair.size, self.total) * shape.context
        seconds = statistics.median(turn["seconds"] for turn in turns)
        peaks = child.ask("memory", self.session.deadline)
        is_bar = pair.size == "1.3B" and pair.compiled and who == "xds-2"
        host = statistics.median(turn["host"] for turn in turns)
        note = (
            f"{tokens / seconds:.0f} tokens/s, {1e3 * seconds:.1f} ms, host {1e3 * host:.1f} ms, "
            f"{tokens} tokens, peak {peaks['allocated'] / 1e9:.1f} GB"
        )
        share = shape.flops(tokens) / seconds / self.flops
        bars = {"must": 0.45, "aim": 0.55} if is_bar else {}
        self.session.add(Row(name, share, unit="", note=note, more_is_better=True, **bars))

    def _theirs(self, pair: Pair) -> Child:
        key = (pair.size, pair.theirs, pair.compiled)
        if self._peer is not None and self._peer[0] == key and self._peer[1].is_alive:
            return self._peer[1]
        self._drop_peer()
        child = self._build(pair, pair.theirs)
        self._peer = (key, child)
        return child

    def _drop_peer(self) -> None:
        if self._peer is not None:
            self._peer[1].end()
        self._peer = None

    def _build(self, pair: Pair, kind: str) -> Child:
        """A contestant after its first steps. Where DeepSpeed's own Adam does not build, it gets torch's."""
        if kind.startswith("deepspeed") and self._own_adam:
            try:
                return self._built(pair, kind)
            except Failed as error:
                print(f"# DeepSpeed's own Adam failed, torch's is taken: {error}", flush=True)
                self._own_adam = False
                unlocked_extensions()
        return self._built(pair, kind)

    def _built(self, pair: Pair, kind: str) -> Child:
        child = self.session.child()
        limit = 60.0 if self.session.dry else BUILD_SECONDS
        if kind.startswith("deepspeed") and not self._own_adam:
            limit = min(limit, 90.0)  # nothing is compiled
        built = child.ask(
            "build",
            min(self.session.deadline, time.monotonic() + limit),
            size=pair.size,
            kind=kind,
            compile=pair.compiled,
            sequences=sequences(pair.size, self.total),
            folder=str(self.session.options.deepspeed or ""),
            own_adam=self._own_adam,
        )
        first = self._losses.setdefault(pair.size, built["losses"])
        gap = max(abs(a - b) / abs(b) for a, b in zip(built["losses"], first, strict=True))
        if gap > 0.02:
            child.end()
            raise Failed(f"VOID: its first losses are {built['losses']}, the first one's {first}")
        return child


def run(session: Session) -> None:
    """Every pair, then a trace of a step at stages 0, 2 and 3 where time is left."""
    Section(session).run()
    if session.left > (3 if session.small else 60):
        import tracing

        tracing.rows(session)


SIZES = list(FULL)
