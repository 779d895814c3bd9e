"""The record of a run, which `xds report` reads: rank 0 appends lines of JSON to `run.jsonl` in a folder.

kind of a line   when                                 what
---------------  -----------------------------------  --------------------------------------------------------
start            an engine is made                    command, config, versions, ranks, device
step             each optimizer step                  loss, learning rate, norm; time since the line before
use              once a second, after a step          memory of rank 0, bytes that it has sent by kind
experts          once a second, after a step          the tokens of each expert in that step
timeline         steps 3, 30, 300, ... of a process   forwards, backwards and update on each rank, in time
value            the script writes monitor events     their names and values
saved            a checkpoint is saved                its path, and its metric
failure          the launcher has found one           its report; see launcher/ranks/run_folder.py
recovered        the other ranks go on after one      what happened, and the seconds that were lost
end              engine.destroy(), or the process ends without a failure

Each line has the number of its engine, `run`, so that `xds report` can tell two that write at the same time.
`spent` of a step, and of the end, is the time by class since the line before: see ledger.py. The first one of
a process has `since`, the clock when its time began. With recovery the lowest rank that is left goes on.
The host waits for the device only at a timeline: the mean of the losses comes with the norm of the gradients.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import shlex
import socket
import sys
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, final

import torch

from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import all_gather_json
from ...ops.device import device_of
from ...ops.device import versions as device_versions
from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.small_files import open_no_link
from ...utils.version import __version__
from ..config.config import Config
from ..process.process import joins
from ..profiling.clock import ProfileClock
from .ledger import Ledger, in_seconds

FILE = "run.jsonl"
USE_SECONDS = 1.0
MOST_SPANS, MOST_RANKS = 1000, 64  # of a timeline
LINK = "record"  # the file in the launcher's run folder that names the record
# whose version counts where they are loaded
_LIBRARIES = (
    "numpy",
    "transformers",
    "accelerate",
    "peft",
)

log = logging.getLogger("xds")


class Measured(Protocol):
    """What a feature has measured in the last step."""

    def line(self) -> dict[str, Any]: ...


class Recorded(Protocol):
    """The part of an engine that is recorded at a step."""

    global_steps: int
    global_samples: int

    def mean_loss(self) -> float: ...
    def get_lr(self) -> list[float]: ...
    def get_global_grad_norm(self) -> float | None: ...


@final
class RunRecord:
    """The record of one engine. Every rank has one, for the timelines; rank 0 writes."""

    def __init__(
        self,
        config: Config,
        device: torch.device,
        collectives: Collectives,
        opened: Sequence[Collectives],
        place: Sequence[int],
        *,
        is_reserve: bool = False,
    ) -> None:
        """
        Args:
            collectives: of all ranks. opened: those of all groups; the list may grow.
            place: this rank's number among pipeline, data, sequence and tensor ranks.
            is_reserve: another group of ranks writes, until it is lost.
        Raises:
            UsageError: on rank 0: the folder cannot be created or written.
        """
        self._folder = Path(config.report_folder).expanduser()
        self._device, self._collectives, self._opened = device, collectives, opened
        self._place = list(place)
        self._clock = ProfileClock(device)
        self._spans: list[tuple[str, Any, Any]] | None = None  # of a step that is timed
        self._labels: list[str] = []
        self._began: Any = None
        self._num_steps = 0
        self._used_at = 0.0
        self._file = -1
        self._at_exit: Any = None
        self.ledger = Ledger()
        self._is_first = True  # this rank has written no time yet
        self._recovers = config.recovery.enabled
        self._run = _number_of_run() if self._recovers else os.urandom(4).hex()
        self._started_at = time.time()
        self._loss = math.nan
        self._saved = ""
        self.is_reserve = is_reserve
        self._is_open = True  # else `close` was called, or the file cannot be written any more
        if collectives.rank == 0 and joins() is None and not is_reserve:
            self._open()
            self._start(config)

    # -- what the engine reports ----------------------------------------------------------------------

    def region(
        self, name: str, inner: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        """The context around a region of a step, which includes `inner`."""
        self.ledger.region(name, trains=torch.is_grad_enabled())
        return inner if self._spans is None else self._timed(name, inner, self._spans)

    @contextmanager
    def _timed(
        self, name: str, inner: AbstractContextManager[None], spans: list[tuple[str, Any, Any]]
    ) -> Iterator[None]:
        if name == "forward" and not torch.is_grad_enabled():
            name = "evaluation"
        start = self._clock.now()
        with inner:
            yield
        if len(spans) < MOST_SPANS:
            spans.append((name, start, self._clock.now()))

    def name_actions(self, row: Sequence[Any]) -> None:
        """The last regions were the actions of a pipeline's `row` that compute."""
        if self._spans is None or len(self._spans) == MOST_SPANS:
            return
        from ...pipe.schedules.actions import COMPUTE

        names = [str(action) for action in row if action.op in COMPUTE]
        self._labels = [""] * (len(self._spans) - len(names)) + names

    def step(self, engine: Recorded, measured: Sequence[Measured] = ()) -> None:
        """An optimizer step has ended."""
        self._num_steps += 1
        spans, self._spans = self._spans, None
        writes, spent = self._writes(), self.ledger.take()
        if writes:
            now, self._loss = time.time(), engine.mean_loss()
            self._append(
                kind="step",
                step=engine.global_steps,
                time=round(now, 4),
                samples=engine.global_samples,
                loss=self._loss,
                lr=engine.get_lr()[0],
                norm=engine.get_global_grad_norm(),
                **self._spent(spent, now),
            )
            if now - self._used_at >= USE_SECONDS:
                self._write_use()
                for each in measured:
                    self._append(step=engine.global_steps, **each.line())
        # processes that have come later count as the others do, and take part in the message
        number = engine.global_steps if self._recovers else self._num_steps
        if _is_timed(number):
            self._write_timeline(engine.global_steps, spans)
        if _is_timed(number + 1):
            self._spans, self._labels, self._began = [], [], self._clock.now()

    def write(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Values of the script: name, value, samples."""
        for name, value, samples in events:
            self._append(kind="value", name=name, value=value, samples=samples)

    def saved(self, folder: str | Path, tag: str, metric: float | None) -> None:
        """A checkpoint was saved."""
        self._saved = str(Path(folder, str(tag)))
        more = {} if metric is None else {"text": f"metric {metric:g}"}
        self._append(kind="saved", path=self._saved, time=time.time(), **more)

    def recovered(self, reason: str, seconds: dict[str, float]) -> None:
        """The ranks go on. seconds: that were lost."""
        self._append(kind="recovered", time=time.time(), text=reason, seconds=seconds)

    def has_joined(self) -> None:
        """This process takes part in a run that others have written. Its time before does not count."""
        self.ledger.take("start")

    def close(self) -> None:
        """No step follows. Logs where things are."""
        if not self._writes():
            self._is_open = False
            return
        self._write_use()
        self._at_exit()
        self._file, self._is_open = -1, False
        seconds = time.time() - self._started_at
        loss = "" if math.isnan(self._loss) else f", loss {self._loss:.4f}"
        log.info("%d steps in %.1f s%s", self._num_steps, seconds, loss)
        if self._saved:
            log.info("last checkpoint: %s", printable(self._saved))
        if "XDS_LOG_FOLDER" in os.environ:
            log.info("output of every rank: %s", os.environ["XDS_LOG_FOLDER"])
        log.info("a page of this run: xds report %s", self._shown)

    @property
    def _shown(self) -> str:
        return shlex.quote(printable(self._folder))

    # -- lines ----------------------------------------------------------------------------------------

    def _writes(self) -> bool:
        """This rank writes. With recovery it may be another one than before."""
        is_chosen = self._is_open and self._collectives.rank == 0 and not self.is_reserve
        if is_chosen and self._file < 0:
            try:
                self._open()
            except UsageError as error:
                self._is_open = is_chosen = False
                log.warning("%s", error)
        self.ledger.is_written = is_chosen
        return is_chosen

    def _spent(self, spent: dict[str, int], now: float) -> dict[str, Any]:
        """The part of a line about time."""
        is_first, self._is_first = self._is_first, False
        since = {"since": round(now - sum(spent.values()) / 1e6, 6)} if is_first else {}
        return {**since, "spent": in_seconds(spent)}

    def _open(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._file = open_no_link(str(self._folder / FILE), flags)
            self._at_exit = weakref.finalize(
                self, _end, self._file, self._run, os.getpid(), self.ledger
            )
            if os.fstat(self._file).st_size:
                os.write(self._file, b"\n")  # after what a killed run has half written
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"report_folder = {self._shown}: {FILE} cannot be written there: {reason}; set another "
                "folder, or remove the key"
            ) from None
        with contextlib.suppress(KeyError, OSError):  # the launcher adds failures
            link = Path(os.environ["XDS_RUN_FOLDER"], LINK)
            link.write_text(str((self._folder / FILE).absolute()))

    def _start(self, config: Config) -> None:
        versions = {"xds": __version__, "Python": platform.python_version()}
        versions |= {"torch": torch.__version__, "system": platform.platform()}
        versions |= device_versions()
        for name in _LIBRARIES:
            if name in sys.modules:
                versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
        device = device_of(self._device).name
        self._append(
            kind="start",
            time=time.time(),
            restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            command=os.environ.get("XDS_COMMAND") or shlex.join(["python", *sys.orig_argv[1:]]),
            folder=os.getcwd(),
            host=socket.gethostname(),
            device=device,
            ranks=self._collectives.world_size,
            output=os.environ.get("XDS_LOG_FOLDER", ""),
            config=_changed(config.as_dict(), Config.model_validate({}).as_dict()),
            versions=versions,
        )

    def _append(self, **line: Any) -> None:
        """Write a line, at once, so that it survives the process. A full disk ends the record, not the run."""
        if not self._writes():
            return
        try:
            _write(self._file, line | {"run": self._run})
        except OSError as error:
            self._at_exit.detach()
            os.close(self._file)
            self._file, self._is_open = -1, False
            log.warning("report_folder: %s cannot be written any more: %s", FILE, error.strerror)

    def _write_use(self) -> None:
        use, self._used_at = device_of(self._device).memory(), time.time()
        sent: Counter[str] = Counter()
        for group in self._opened:
            sent.update(group.sent_bytes)
        self._append(
            kind="use",
            time=self._used_at,
            memory_bytes=use.now_bytes,
            peak_bytes=use.peak_bytes,
            sent_bytes=dict(sent),
            steps=self._num_steps,
        )

    def _write_timeline(self, step: int, spans: list[tuple[str, Any, Any]] | None) -> None:
        """Gather the regions of a step from all ranks. Waits for the device; a collective.

        spans: of this rank; None: it has not timed this step.
        """
        stop = self._clock.now()
        self._clock.finish()
        seconds = self._clock.seconds
        mine: dict[str, Any] = {}
        if spans is not None and self._collectives.rank < MOST_RANKS:
            labels = self._labels + [""] * (len(spans) - len(self._labels))
            mine = {
                "place": self._place,
                "peak_bytes": device_of(self._device).memory().peak_bytes,
                "milliseconds": round(1e3 * seconds(self._began, stop), 3),
                "spans": [
                    [name, label, *(round(1e3 * seconds(self._began, at), 3) for at in (one, two))]
                    for (name, one, two), label in zip(spans, labels, strict=True)
                ],
            }
        ranks = all_gather_json(self._collectives, mine, "the timeline of a step")
        ranks = [each for each in ranks[:MOST_RANKS] if each]
        self._append(kind="timeline", step=step, time=time.time(), ranks=ranks)


def _is_timed(number: int) -> bool:
    """3, 30, 300, ..."""
    return str(number).rstrip("0") == "3"


def _write(file: int, line: dict[str, Any]) -> None:
    text = json.dumps(line, ensure_ascii=False)
    os.write(file, text.encode(errors="replace") + b"\n")  # no halves of characters


def _number_of_run() -> str:
    """The same on all ranks, so that another rank can go on with the record."""
    names = ("XDS_RUN_FOLDER", "XDS_LIGHTHOUSE", "TORCHELASTIC_RESTART_COUNT")
    return f"{zlib.crc32(repr([os.environ.get(name) for name in names]).encode()):08x}"


def _end(file: int, run: str, pid: int, ledger: Ledger) -> None:
    """End a record: at `close`, or where the script ends without `engine.destroy()`."""
    is_over = ledger.is_written and os.getpid() == pid  # not in a fork
    if is_over and not hasattr(sys, "last_type"):  # nor after an exception
        spent = in_seconds(ledger.take())
        with contextlib.suppress(OSError):
            _write(file, {"kind": "end", "time": time.time(), "run": run, "spent": spent})
    os.close(file)


def _changed(config: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """The values that differ from their default."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        other = default.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            value = _changed(value, other)
            if value:
                found[key] = value
        elif value != other:
            found[key] = value
    return found


__all__ = ["FILE", "LINK", "RunRecord"]
