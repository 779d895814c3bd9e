"""Reads the record of a run: the lines of engine/telemetry/record.py, also while they are being written.

The file may be damaged or hostile: a line that is no record is skipped and counted. Steps that a later process
has repeated are those of the later process: a killed run that resumes gives one curve. Of two engines that
write at the same time the one that began last counts.
"""

from __future__ import annotations

import os
import stat
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, final, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ...utils.errors import UsageError
from ...utils.quoting import printable

FILE = "run.jsonl"
MOST_LINE_BYTES = 4 << 20
MOST_SERIES = 16  # of the script
MOST_EVENTS = 200  # starts, failures, checkpoints
MOST_TIMELINES = 8
NAN = float("nan")


# -- the kinds of lines -----------------------------------------------------------------------------------


class _Line(BaseModel):
    """run: the number of the engine that wrote the line; "" where none did."""

    model_config = ConfigDict(strict=True)
    run: str = ""


class Start(_Line):
    """A process has started. `command` and what follows is shown as it is."""

    kind: Literal["start"] = "start"
    time: float = 0.0
    ranks: Any = ""
    restart: Any = 0
    command: Any = ""
    folder: Any = ""
    host: Any = ""
    device: Any = ""
    output: Any = ""
    config: Any = None
    versions: Any = None


Seconds = Annotated[float, Field(ge=0, le=1e10, allow_inf_nan=False)]
Class = Literal[
    "start", "step", "data", "evaluation", "save", "stall", "repeated", "restart", "other"
]
CLASSES: tuple[Class, ...] = get_args(Class)
Spent = dict[Class, Seconds]


class _Step(_Line):
    """spent: seconds by class since the line before. since: the clock when they began, of the first line."""

    kind: Literal["step"]
    step: Annotated[int, Field(ge=0, lt=1 << 62)]
    samples: float
    time: float
    loss: float | None = None
    lr: float | None = None
    norm: float | None = None
    spent: Spent = {}
    since: Seconds | None = None


class _Value(_Line):
    kind: Literal["value"]
    name: str
    value: float
    samples: float


class Use(_Line):
    """Bytes in use on rank 0, and what it has sent by kind in so many steps of its process."""

    kind: Literal["use"]
    memory_bytes: float
    peak_bytes: float
    sent_bytes: dict[str, float]
    steps: float


class Layer(BaseModel):
    """The tokens of each expert of a layer, and the choices that were dropped."""

    name: str
    counts: list[Annotated[int, Field(ge=0)]]
    dropped: Annotated[int, Field(ge=0)] = 0


class Experts(_Line):
    """The experts of all layers in one step."""

    kind: Literal["experts"]
    step: int
    layers: list[Layer]


class Span(NamedTuple):
    """A region of a step: forward, backward, reduce, step or evaluation. Times are in milliseconds."""

    name: str
    label: str
    start: float
    end: float


class RankTimeline(_Line):
    """A step on one rank. place: among pipeline, data, sequence and tensor ranks."""

    place: list[int]
    peak_bytes: float
    milliseconds: float
    spans: list[Span]


class Timeline(_Line):
    """A step on all ranks, by rank. time: of its end."""

    kind: Literal["timeline"]
    step: int
    time: float
    ranks: Annotated[list[RankTimeline], Field(min_length=1)]


class Event(_Line):
    """Beside a start what the page lists: a checkpoint, a failure, that the others go on, the end.

    seconds: that a failure has cost, by class. spent: of the end, as that of a step.
    """

    kind: Literal["saved", "failure", "recovered", "end"]
    time: float
    path: str = ""
    text: str = ""
    seconds: Spent = {}
    spent: Spent = {}


_Kinds = Start | _Step | _Value | Use | Experts | Timeline | Event
_LINE = TypeAdapter[_Kinds](Annotated[_Kinds, Field(discriminator="kind")])


# -- the run ----------------------------------------------------------------------------------------------


def _numbers() -> array[float]:
    return array("d")


@final
@dataclass
class Run:
    """What a record says.

    steps, samples, times, loss, rates, norms: a number for each step; NaN where it is not known.
    values: what the script wrote: samples and values, by name.
    memory: of rank 0: after which steps, bytes in use, and the most so far.
    breaks: indices of the first steps of later processes. start, use, experts: the last ones.
    ledger: seconds by class since the start of the first process. Their sum is the time until the last line
    of a step. failures: what has cost time.
    damaged: lines that were skipped. foreign: lines of another engine, which still wrote after the last start.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    samples: array[float] = field(default_factory=_numbers)
    times: array[float] = field(default_factory=_numbers)
    loss: array[float] = field(default_factory=_numbers)
    rates: array[float] = field(default_factory=_numbers)
    norms: array[float] = field(default_factory=_numbers)
    values: dict[str, tuple[array[float], array[float]]] = field(default_factory=dict)
    memory: tuple[array[float], ...] = field(
        default_factory=lambda: (_numbers(), _numbers(), _numbers())
    )
    use: Use | None = None
    experts: Experts | None = None
    timelines: list[Timeline] = field(default_factory=list)
    breaks: list[int] = field(default_factory=list)
    start: Start = field(default_factory=Start)
    num_starts: int = 0
    events: list[Start | Event] = field(default_factory=list)
    ledger: dict[Class, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    failures: list[Event] = field(default_factory=list)
    last_time: float = 0.0
    damaged: int = 0
    foreign: int = 0

    @property
    def state(self) -> str:
        """start, failure or end: the last of them."""
        return next((each.kind for each in reversed(self.events) if each.kind != "saved"), "")

    def step_at(self, samples: float) -> int:
        """The step after which the run had so many samples."""
        at = bisect_left(self.samples, samples)
        return self.steps[min(at, len(self.steps) - 1)] if self.steps else 0


def read_run(folder: str) -> Run:
    """The run whose record is in `folder`.

    Raises:
        UsageError: there is no record, or it cannot be read.
    """
    path = Path(folder, FILE)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        with open(descriptor, "rb", buffering=1 << 20) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(0, "it is not a file")
            run = _Reader().read(file)
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
        self._former: set[str] = set()  # engines before the last one that started
        self._named: set[str] = set()  # values that the last one has written
        self._trained = _numbers()  # seconds of each step
        self._until: float | None = None  # the clock; time before it is in the ledger
        self._failed: Event | None = None  # the failure since the last step

    def read(self, file: BinaryIO) -> Run:
        run = self._run
        for line in _lines(file):
            try:
                self._add(_LINE.validate_json(line))
            except ValidationError:
                run.damaged += line.endswith(b"\n")  # else it is being written
        return run

    def _add(self, found: _Kinds) -> None:
        run = self._run
        if found.run in self._former:
            run.foreign += not isinstance(found, Event)
        elif isinstance(found, _Step):
            self._step(found)
        elif isinstance(found, _Value):
            self._value(found)
        elif isinstance(found, Use | Experts | Timeline):
            self._measured(found)
        else:
            if isinstance(found, Start):
                self._start(found)
            else:
                self._event(found)
            run.events = [*run.events[1 - MOST_EVENTS :], found]
            run.last_time = max(run.last_time, found.time)

    def _start(self, found: Start) -> None:
        run = self._run
        if run.start.run:
            self._former.add(run.start.run)
        self._named.clear()
        run.start, self._is_new = found, True
        run.num_starts += 1

    def _event(self, found: Event) -> None:
        if found.kind in ("failure", "recovered"):
            self._failed = found
            self._run.failures = [*self._run.failures[1 - MOST_EVENTS :], found]
        if self._until is not None:
            self._count(found.spent)

    # -- the ledger of time -------------------------------------------------------------------------------

    def _count(self, spent: Mapping[Class, float]) -> None:
        for name, seconds in spent.items():
            self._run.ledger[name] += seconds
        self._until = (self._until or 0.0) + sum(spent.values())

    def _begin(self, since: float, spent: dict[Class, float]) -> None:
        """The first time that a process has written. What lies before it is in the ledger as well."""
        until, failed = self._until, self._failed
        if until is None:
            self._until = since
            return
        if since < until:  # two engines of one process, or clocks that differ
            most: Class = max(spent, key=lambda name: spent[name], default="start")
            spent[most] = max(0.0, spent.get(most, 0.0) - (until - since))
            return
        gap: dict[Class, float] = {"restart": since - until} if self._is_new else {}
        if failed is not None and failed.kind == "failure" and self._is_new:
            repeated = min(max(failed.time - until, 0.0), since - until)
            gap = {"repeated": repeated, "restart": since - until - repeated}
            self._lose(gap | {"start": spent.get("start", 0.0)})
        if not gap:
            gap = {"stall": since - until}
            if failed is not None and "stall" not in failed.seconds:
                self._lose(gap)  # the process that goes on with the record does not know it
        self._count(gap)

    def _lose(self, seconds: Mapping[Class, float]) -> None:
        """The last failure has cost so much more."""
        if self._failed is not None:
            known = self._failed.seconds
            for name, more in seconds.items():
                known[name] = known.get(name, 0.0) + more

    def _repeat(self, at: int) -> None:
        """Steps from the index `at` on were for nothing."""
        seconds = sum(self._trained[at:])
        self._run.ledger["step"] -= seconds
        self._run.ledger["repeated"] += seconds
        self._lose({"repeated": seconds})

    # -- curves -------------------------------------------------------------------------------------------

    def _measured(self, found: Use | Experts | Timeline) -> None:
        run = self._run
        if isinstance(found, Experts):
            run.experts = found
        elif isinstance(found, Timeline):
            run.timelines = [*run.timelines[1 - MOST_TIMELINES :], found]
        else:
            run.use = found
            if run.steps:
                new = (run.steps[-1], found.memory_bytes, found.peak_bytes)
                for column, value in zip(run.memory, new, strict=True):
                    column.append(value)

    def _step(self, found: _Step) -> None:
        run = self._run
        if run.steps and found.step <= run.steps[-1]:
            self._forget_from(found.step, found.samples)
        spent = dict(found.spent)
        if found.since is not None:
            self._begin(found.since, spent)
        self._count(spent)
        self._trained.append(spent.get("step", 0.0))
        if self._is_new and run.steps:
            run.breaks.append(len(run.steps))
        self._is_new = False
        values = (found.step, found.samples, found.time, found.loss, found.lr, found.norm)
        for column, value in zip(self._columns, values, strict=True):
            column.append(NAN if value is None else value)
        if found.time > run.last_time:
            run.last_time = found.time
        self._failed = None

    @property
    def _is_again(self) -> bool:
        """The last process was started because one before it has failed."""
        return self._run.start.restart not in (0, "")

    def _value(self, found: _Value) -> None:
        series = self._run.values
        if found.name not in series and len(series) == MOST_SERIES:
            return
        where, values = series.setdefault(found.name, (_numbers(), _numbers()))
        is_first = found.name not in self._named
        self._named.add(found.name)
        while where and (where[-1] > found.samples or (is_first and where[-1] == found.samples)):
            where.pop()  # of a process that was killed
            values.pop()
        where.append(found.samples)
        values.append(found.value)

    def _forget_from(self, step: int, samples: float) -> None:
        """A later process repeats the steps from `step` on."""
        run = self._run
        at = bisect_left(run.steps, step)
        if at or self._is_again:
            self._repeat(at)
        else:
            run.ledger.update(dict.fromkeys(CLASSES, 0.0))
            run.failures, self._until, self._failed = [], None, None
        for column in (*self._columns, self._trained):
            del column[at:]
        while run.breaks and run.breaks[-1] >= at:
            run.breaks.pop()
        run.timelines = [each for each in run.timelines if each.step < step]
        if not at:  # another run: nothing of the former one is left
            run.values = {name: run.values[name] for name in run.values if name in self._named}
        for series, end in [*((each, samples) for each in run.values.values()), (run.memory, step)]:
            while series[0] and series[0][-1] >= end:
                for column in series:
                    column.pop()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines that are not empty. One that is too long is no record: an empty one stands for it."""
    while line := file.readline(MOST_LINE_BYTES):
        rest = line
        while len(rest) == MOST_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MOST_LINE_BYTES)
        if rest is not line:
            yield b"\n"
        elif not line.isspace():
            yield line


__all__ = [
    "CLASSES",
    "Event",
    "Experts",
    "RankTimeline",
    "Run",
    "Span",
    "Start",
    "Timeline",
    "Use",
    "read_run",
]
