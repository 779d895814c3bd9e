"""Reads the record of a run: the lines of engine/telemetry/record.py, also while they are being written.

The file may be damaged or hostile: a line that is no record is skipped and counted. Steps that a later process
has repeated are those of the later process: a killed run that resumes gives one curve.
"""

from __future__ import annotations

import json
import os
import stat
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, final

from ...utils.errors import UsageError
from ...utils.quoting import printable

FILE = "run.jsonl"
MOST_LINE_BYTES = 4 << 20
MOST_SERIES = 16  # of the script
MOST_EVENTS = 200  # starts, failures, checkpoints
MOST_TIMELINES = 8
NAN = float("nan")
_NUMBERS = {int, float}


@final
@dataclass
class Span:
    """A region of a step: forward, backward, reduce, step or evaluation. Times are in milliseconds."""

    name: str
    label: str
    start: float
    end: float


@final
@dataclass
class RankTimeline:
    """A step on one rank."""

    rank: int
    place: list[int]
    peak_bytes: float
    milliseconds: float
    spans: list[Span]


@final
@dataclass
class Timeline:
    """A step on all ranks. time: of its end."""

    step: int
    time: float
    ranks: list[RankTimeline]


@final
@dataclass
class Run:
    """What a record says.

    steps, samples, times, loss, rates, norms: a number for each step; NaN where it is not known.
    values: what the script wrote: samples and values, by name.
    memory: of rank 0: after which steps, bytes in use, and the most so far.
    sent_bytes: what the last process of rank 0 has sent, by kind, in `sent_steps` steps.
    breaks: indices of the first steps of later processes. events: (time, kind, text), in their order.
    damaged: lines that were skipped.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    samples: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))
    loss: array[float] = field(default_factory=lambda: array("d"))
    rates: array[float] = field(default_factory=lambda: array("d"))
    norms: array[float] = field(default_factory=lambda: array("d"))
    values: dict[str, tuple[array[float], array[float]]] = field(default_factory=dict)
    memory: tuple[array[float], array[float], array[float]] = field(
        default_factory=lambda: (array("d"), array("d"), array("d"))
    )
    sent_bytes: dict[str, float] = field(default_factory=dict)
    sent_steps: float = 0.0
    timelines: list[Timeline] = field(default_factory=list)
    breaks: list[int] = field(default_factory=list)
    start: dict[str, Any] = field(default_factory=dict)  # of the last process
    num_starts: int = 0
    events: list[tuple[float, str, str]] = field(default_factory=list)
    last_time: float = 0.0
    damaged: int = 0

    @property
    def state(self) -> str:
        """How the last process ended; "" where it has not said so."""
        return next((kind for _, kind, _ in reversed(self.events) if kind in _STATES), "")

    def step_at(self, samples: float) -> int:
        """The step after which the run had so many samples."""
        at = bisect_left(self.samples, samples)
        return self.steps[min(at, len(self.steps) - 1)] if self.steps else 0


_STATES = ("start", "failure", "end")


def read_run(folder: str) -> Run:
    """The run whose record is in `folder`.

    Raises:
        UsageError: there is no record, or it cannot be read.
    """
    path = Path(folder, FILE)
    reader, run = _Reader(), Run()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        with open(descriptor, "rb", buffering=1 << 20) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(0, "it is not a file")
            run = reader.read(file)
    except FileNotFoundError:
        raise UsageError(
            f"{printable(folder)} has no {FILE}, so there is nothing to report; before a run set "
            "report_folder of the config to a folder, and name it here"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{printable(path)} cannot be read: {reason}") from None
    if not run.num_starts and not run.steps:
        raise UsageError(
            f"{printable(path)} has no line of a run ({run.damaged} lines are damaged)"
        )
    return run


@final
class _Reader:
    """Adds line after line to a `Run`."""

    def __init__(self) -> None:
        self._run = run = Run()
        self._columns: tuple[array[Any], ...] = (
            *(run.steps, run.samples, run.times),
            *(run.loss, run.rates, run.norms),
        )
        self._is_new = False  # the process has started and has not ended a step
        self._add = {
            "step": self._step,
            "value": self._value,
            "use": self._use,
            "start": self._start,
            "timeline": self._timeline,
            "saved": self._event,
            "failure": self._event,
            "end": self._event,
        }

    def read(self, file: BinaryIO) -> Run:
        run, add = self._run, self._add
        for line in _lines(file):
            try:
                record = json.loads(line)
                add[record["kind"]](record)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
                run.damaged += line.endswith(b"\n")  # else it is being written
        return run

    def _step(self, record: dict[str, Any]) -> None:
        run, step = self._run, record["step"]
        if type(step) is not int or not 0 <= step < 1 << 62:
            raise TypeError
        values = [record["samples"], record["time"]]
        values += [NAN if (x := record.get(name)) is None else x for name in ("loss", "lr", "norm")]
        values = [_number(x) for x in values]
        if run.steps and step <= run.steps[-1]:
            self._forget_from(step, values[0])
        if self._is_new and run.steps:
            run.breaks.append(len(run.steps))
        self._is_new = False
        for column, value in zip(self._columns, (step, *values), strict=True):
            column.append(value)
        if values[1] > run.last_time:
            run.last_time = values[1]

    def _forget_from(self, step: int, samples: float) -> None:
        """A later process repeats the steps from `step` on."""
        run = self._run
        at = bisect_left(run.steps, step)
        for column in self._columns:
            del column[at:]
        while run.breaks and run.breaks[-1] >= at:
            run.breaks.pop()
        run.timelines = [each for each in run.timelines if each.step < step]
        for series, end in [*((each, samples) for each in run.values.values()), (run.memory, step)]:
            while series[0] and series[0][-1] >= end:
                for column in series:
                    column.pop()

    def _value(self, record: dict[str, Any]) -> None:
        name, samples, value = _text(record["name"]), _number(record["samples"]), record["value"]
        values = self._run.values
        if name in values or len(values) < MOST_SERIES:
            value = _number(value)
            where, found = values.setdefault(name, (array("d"), array("d")))
            where.append(samples)
            found.append(value)

    def _use(self, record: dict[str, Any]) -> None:
        run = self._run
        found = [_number(record[name]) for name in ("steps", "memory_bytes", "peak_bytes")]
        run.sent_bytes = {_text(kind): _number(n) for kind, n in record["sent_bytes"].items()}
        run.sent_steps = found[0]
        if run.steps:
            found[0] = run.steps[-1]
            for column, value in zip(run.memory, found, strict=True):
                column.append(value)

    def _start(self, record: dict[str, Any]) -> None:
        ranks, restart = record.get("ranks", 1), record.get("restart", 0)
        self._note(record["time"], "start", f"{ranks} ranks, restart {restart}")
        self._run.start = record
        self._run.num_starts += 1
        self._is_new = True

    def _timeline(self, record: dict[str, Any]) -> None:
        ranks = [
            RankTimeline(
                number,
                [int(_number(at)) for at in each["place"]],
                _number(each["peak_bytes"]),
                _number(each["milliseconds"]),
                [
                    Span(_text(name), _text(label), _number(start), _number(end))
                    for name, label, start, end in each["spans"]
                ],
            )
            for number, each in enumerate(record["ranks"])
            if each
        ]
        step, time = int(_number(record["step"])), _number(record["time"])
        if ranks:
            self._run.timelines = self._run.timelines[1 - MOST_TIMELINES :]
            self._run.timelines.append(Timeline(step, time, ranks))

    def _event(self, record: dict[str, Any]) -> None:
        text = record.get("path", record.get("text", ""))
        self._note(record["time"], record["kind"], _text(text))

    def _note(self, time: Any, kind: str, text: str) -> None:
        run, time = self._run, _number(time)
        run.events = run.events[1 - MOST_EVENTS :]
        run.events.append((time, kind, text))
        run.last_time = max(run.last_time, time)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines that are not empty. One that is too long is no record, so its first part stands for it."""
    while line := file.readline(MOST_LINE_BYTES):
        if line.endswith(b"\n") or len(line) < MOST_LINE_BYTES:
            if not line.isspace():
                yield line
            continue
        while part := file.readline(MOST_LINE_BYTES):
            if part.endswith(b"\n"):
                break
        yield b"\n"


def _number(value: Any) -> float:
    if type(value) not in _NUMBERS:
        raise TypeError
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return str(value)


__all__ = ["FILE", "RankTimeline", "Run", "Span", "Timeline", "read_run"]
