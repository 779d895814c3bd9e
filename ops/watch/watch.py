"""Records the collectives of one engine on this rank, and explains a failed wait.

    wait fails -> this rank's report -> the group's store -> the reports of all ranks -> one PeerError

Before a failure a collective costs a count, an entry in the ring and a search for the script's line. Nothing
is formatted, sent or imported before a failure.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, final

from ...utils.errors import PeerError
from .ring import Record, place_of_caller, place_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .diagnosis import RankReport
    from .reports import ReportExchange
    from .store import Store

STRIDES = (4, 32, 256, 2048, 16384)  # steps
KEPT = 4  # how many totals of each stride are kept

RING_SIZE = 128  # collectives that a rank remembers, unless the config sets another number


@final
class Steps:
    """The totals of this rank's time at some of its steps."""

    def __init__(self) -> None:
        self.count = 0
        self._begin_seconds = 0.0
        self._kept: dict[int, deque[tuple[int, float, float]]] = {
            stride: deque(maxlen=KEPT) for stride in STRIDES
        }

    def add(self, now_seconds: float, waited_seconds: float) -> None:
        """Record the end of a step. `waited_seconds` is the total of all waits so far."""
        self.count += 1
        if self.count == 1:
            self._begin_seconds = now_seconds
        if self.count % STRIDES[0]:
            return
        total = (self.count, round(now_seconds - self._begin_seconds, 5), round(waited_seconds, 5))
        for stride in STRIDES:
            if self.count % stride:
                break
            self._kept[stride].append(total)

    def totals(self) -> list[tuple[int, float, float]]:
        """(step, wall, wait) of every total that is kept, as JSON values."""
        return sorted({total for kept in self._kept.values() for total in list(kept)})


@final
class Probe:
    """Detects that a device's queue is stuck: on a device, a collective's wait returns before the work is done.

    It records an event on the default stream, and a new one each time the event has completed. Only the watcher
    thread uses it, so the training thread has no cost. It does not see streams that the default stream does not
    wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = None
        self.count = 0

    def is_stuck(self) -> bool:
        """Whether the event of the last call has not completed. `count` is the number of that event."""
        if self._event is not None and not self._event.query():
            return True
        self._event = self._record()
        self.count += 1
        return False

    def _record(self) -> Any:
        from ..device import device_of

        return device_of(
            self._device
        ).event()  # the current stream of a new thread is the default one


class WaitProgress(Protocol):
    """A wait that consists of several waits. `num_done` is how many of them are over."""

    num_done: int


class Diagnoser(Protocol):
    """The watcher's interface for a watch: it requests reports from all ranks."""

    def diagnose(self, report: RankReport) -> str:
        """Return the message about all ranks. Takes a little more than `PATIENCE_SECONDS` at most."""


@final
class Watch:
    """Remembers which collectives this rank started, and turns a failed wait into a `PeerError`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        engine: int,
        open_store: Callable[[], Store | None],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.engine = engine
        self.open_store = open_store
        self.ring: deque[Record] = deque(maxlen=RING_SIZE)
        self.waiting: tuple[Record, float] | None = None  # the current wait, and its begin
        self._progress: WaitProgress | None = None  # of the current wait
        self.is_failing = False
        self.lost: int | None = None  # a rank that has ended, as another rank reports
        self.recovers = (
            False  # a failed wait is not the end of the run, so nobody asks for the reasons
        )
        self.waited_seconds = 0.0
        self.steps = Steps()
        self.thread = threading.main_thread().ident or 0  # the thread that trains
        self.diagnoser: Diagnoser | None = None
        self.places: Mapping[int, str] = {}  # what a rank has, for messages
        self.probe: Probe | None = None  # set where a wait returns before the work is done
        self._names: dict[int, str] = {}
        self._counts: dict[tuple[str, int, str], int] = {}
        self._serial = 0
        self._has_published = False
        self._diagnosis = ""

    def regroup(self, rank: int, world_size: int, open_store: Callable[[], Store | None]) -> None:
        """The group has other ranks from now on, none of which has failed."""
        self.rank, self.world_size, self.open_store = rank, world_size, open_store
        self.waiting, self.lost, self.is_failing = None, None, False
        self._has_published, self._diagnosis = False, ""

    def keep(self, ring_size: int) -> None:
        """Remember the last `ring_size` collectives from now on."""
        self.ring = deque(self.ring, maxlen=ring_size)

    def name(self, buffer: int, name: str) -> None:
        """Use `name` for `buffer` in messages from now on."""
        taken = name in self._names.values()
        self._names[buffer] = f"{name} (buffer {buffer})" if taken else name

    def start(self, kind: str, buffer: int, what: str = "", tensor: Tensor | None = None) -> Record:
        """Record that this rank starts a collective of `buffer` with `tensor`; `what` names it in messages."""
        if self._has_published:
            self._withdraw()
        key = (kind, buffer, what)
        number = self._counts[key] = self._counts.get(key, 0) + 1
        self._serial += 1
        record = Record(kind, buffer, what, number, self._serial, time.monotonic())
        if tensor is not None:
            record.numel, record.dtype = tensor.numel(), tensor.dtype
        record.place = place_of_caller()
        self.ring.append(record)
        return record

    def begin_wait(self, record: Record, progress: WaitProgress | None = None) -> float:
        """Record that this rank waits in `record`. Returns the time, for `end_wait`."""
        now = time.monotonic()
        self._progress = progress
        self.waiting = (record, now)
        return now

    def end_wait(self, record: Record, begin_seconds: float) -> None:
        """Record the end of the wait that began at `begin_seconds`."""
        record.ended_seconds = now = time.monotonic()
        self.waited_seconds += now - begin_seconds
        self.waiting = None

    def position(self) -> tuple[Record, float, int] | None:
        """The current wait, which changes with each message that arrives; None for no wait."""
        waiting, progress = self.waiting, self._progress
        return None if waiting is None else (*waiting, progress.num_done if progress else 0)

    def step(self) -> None:
        """Record the end of a training step."""
        self.thread = threading.get_ident()
        self.steps.add(time.monotonic(), self.waited_seconds)

    def failed(self, record: Record, error: RuntimeError, peer: int | None) -> PeerError:
        """Return the error to raise for a failed wait in `record`. Takes `PATIENCE_SECONDS` at most.

        Args:
            error: the backend's error; peer: the rank that it is about, if known.
        """
        if self.recovers:
            self.waiting = None
            return PeerError(f"{self.call(record.key)} failed on rank {self.rank}: {error}")
        if not self._diagnosis:
            self.is_failing = True
            message = str(error)
            if peer is None and self.world_size == 2:
                peer = 1 - self.rank
            # a peer that failed before this rank closes the connection as well, but it has published a report
            is_closed = "Timed out" not in message and "timeout" not in message
            report = self.report_wait(record, gone=peer if is_closed else None)
            if self.diagnoser is None:
                diagnosis = self._diagnose(report)
            else:
                diagnosis = self.diagnoser.diagnose(report)
            first = message.split("\n")[0].rpartition("] ")[2]
            reason = first.partition(". This is")[0].rstrip(". ")
            self._diagnosis = (
                f"{report.waits_in} failed on rank {self.rank} of {self.world_size} ({reason}). Another "
                f"rank stopped, or took a different path through its code: {diagnosis}"
            )
        self.waiting = None
        # a group does not recover: later waits fail for the same reason
        return PeerError(self._diagnosis)

    @contextmanager
    def guard(
        self, kind: str, buffer: int, what: str = "", tensor: Tensor | None = None
    ) -> Iterator[Record]:
        """Wrap a blocking collective: record it, and turn its RuntimeError into a PeerError."""
        record = self.start(kind, buffer, what, tensor)
        begin_seconds = self.begin_wait(record)
        try:
            yield record
        except RuntimeError as error:
            raise self.failed(record, error, None) from error
        self.end_wait(record, begin_seconds)

    @contextmanager
    def publishing_errors(self, where: str) -> Iterator[None]:
        """Wrap user code: publish an exception of this rank to the ranks that will wait for it."""
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            text = "".join(traceback.format_exception_only(error)).partition("\n")[0]
            exchange = self.exchange()
            if exchange is not None:
                try:
                    exchange.publish(self.report(raised=f"{text[:200]} in {where}"))
                    self._has_published = True
                except RuntimeError:
                    pass  # the store is not reachable any more
            raise

    # -- reports ----------------------------------------------------------------------------------------

    def report_wait(self, record: Record, **fields: Any) -> RankReport:
        """The report that this rank waits in `record`."""
        return self.report(
            waits_in=self.call(record.key),
            number=record.number,
            serial=record.serial,
            shape=record.shape,
            place=place_text(record.place),
            members=record.members,
            **fields,
        )

    def report(self, **fields: Any) -> RankReport:
        from .diagnosis import RankReport

        counts: Counter[str] = Counter()
        for key, number in list(self._counts.items()):
            counts[self.call(key)] += number
        recent = [self.call(record.key) for record in list(self.ring)]
        return RankReport(self.rank, self.engine, counts=dict(counts), recent=recent, **fields)

    def call(self, key: tuple[str, int, str]) -> str:
        """E.g. "all_gather of unit 'blocks.5'"."""
        kind, buffer, what = key
        return f"{kind} of {what or self._names.get(buffer, f'flat buffer {buffer}')}"

    # -- through the store ------------------------------------------------------------------------------

    def exchange(self) -> ReportExchange | None:
        """The exchange through the group's store; None where there is no store."""
        from .reports import ReportExchange

        store = self.open_store()
        return (
            None
            if store is None
            else ReportExchange(store, self.rank, self.world_size, self.engine)
        )

    def _withdraw(self) -> None:
        """Delete this rank's report. The rank continued, so the report must not explain a later failure."""
        self._has_published = False
        exchange = self.exchange()
        if exchange is not None and not self._diagnosis:
            try:
                exchange.withdraw()
            except RuntimeError:
                return

    def _diagnose(self, mine: RankReport) -> str:
        """The diagnosis without a watcher, from the reports that other ranks publish."""
        from .diagnosis import explain
        from .reports import REPORTED_SECONDS

        store, reports = self.open_store(), {self.rank: mine}
        if store is not None:
            # a new connection to a process that has stopped waits without a limit, so a thread opens it
            thread = threading.Thread(
                target=self._collect, args=(store, mine, reports), name="xds-reports", daemon=True
            )
            thread.start()
            thread.join(REPORTED_SECONDS)
        by_rank = sorted(reports.copy().items())
        return explain([report for _, report in by_rank], self.world_size, None, self.places)

    def _collect(self, store: Store, mine: RankReport, reports: dict[int, RankReport]) -> None:
        """Publish this rank's report, and add those of the others to `reports`."""
        from .reports import PATIENCE_SECONDS, ReportExchange

        deadline = time.monotonic() + PATIENCE_SECONDS
        try:
            # another thread may wait for a key of torch's, which would block this connection
            own = store.own_connection()
            exchange = ReportExchange(own, self.rank, self.world_size, self.engine)
            exchange.publish(mine)
            self._has_published = True
            reports.update(exchange.collect(mine, deadline))
            exchange.wait_for_readers(reports, deadline)
        except RuntimeError:
            pass  # the store is not reachable any more
