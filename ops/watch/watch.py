"""Counts the collectives of one engine on this rank, keeps the last ones, and explains a failed wait.

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
from .ring import Mark, place_of_caller, place_text

if TYPE_CHECKING:
    from torch import Tensor

    from .device import Probe
    from .diagnosis import Report
    from .exchange import Exchange
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


class Diagnoser(Protocol):
    """The sentinel's interface for a watch: it requests reports from all ranks."""

    def diagnose(self, report: Report) -> str:
        """The message about all ranks. Takes a little more than `PATIENCE_SECONDS` at most."""


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
        self.ring: deque[Mark] = deque(maxlen=RING_SIZE)
        self.waiting: tuple[Mark, float] | None = None  # the current wait, and its begin
        self.is_failing = False
        self.lost: int | None = None  # a rank that has ended, as another rank reports
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

    def keep(self, ring_size: int) -> None:
        """Remember the last `ring_size` collectives from now on."""
        self.ring = deque(self.ring, maxlen=ring_size)

    def name(self, buffer: int, name: str) -> None:
        """Use `name` for `buffer` in messages from now on."""
        taken = name in self._names.values()
        self._names[buffer] = f"{name} (buffer {buffer})" if taken else name

    def start(self, kind: str, buffer: int, what: str = "", tensor: Tensor | None = None) -> Mark:
        """Record that this rank starts a collective of `buffer` with `tensor`; `what` names it in messages."""
        if self._has_published:
            self._withdraw()
        key = (kind, buffer, what)
        number = self._counts[key] = self._counts.get(key, 0) + 1
        self._serial += 1
        mark = Mark(kind, buffer, what, number, self._serial, time.monotonic())
        if tensor is not None:
            mark.numel, mark.dtype = tensor.numel(), tensor.dtype
        mark.place = place_of_caller()
        self.ring.append(mark)
        return mark

    def begin_wait(self, mark: Mark) -> float:
        """Record that this rank waits in `mark`. Returns the time, for `end_wait`."""
        now = time.monotonic()
        self.waiting = (mark, now)
        return now

    def end_wait(self, mark: Mark, begin_seconds: float) -> None:
        """Record the end of the wait that began at `begin_seconds`."""
        mark.ended_seconds = now = time.monotonic()
        self.waited_seconds += now - begin_seconds
        self.waiting = None

    def step(self) -> None:
        """Record the end of a training step."""
        self.thread = threading.get_ident()
        self.steps.add(time.monotonic(), self.waited_seconds)

    def failed(self, mark: Mark, error: RuntimeError, peer: int | None) -> PeerError:
        """The error to raise for a failed wait in `mark`. Takes `PATIENCE_SECONDS` at most.

        Args:
            error: the backend's error; peer: the rank that it is about, if known.
        """
        if not self._diagnosis:
            self.is_failing = True
            message = str(error)
            if peer is None and self.world_size == 2:
                peer = 1 - self.rank
            # a peer that failed before this rank closes the connection as well, but it has published a report
            is_closed = "Timed out" not in message and "timeout" not in message
            report = self.report_wait(mark, gone=peer if is_closed else None)
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
        return PeerError(
            self._diagnosis
        )  # a group does not recover: later waits fail for the same reason

    @contextmanager
    def guard(
        self, kind: str, buffer: int, what: str = "", tensor: Tensor | None = None
    ) -> Iterator[Mark]:
        """Wrap a blocking collective: record it, and turn its RuntimeError into a PeerError."""
        mark = self.start(kind, buffer, what, tensor)
        begin_seconds = self.begin_wait(mark)
        try:
            yield mark
        except RuntimeError as error:
            raise self.failed(mark, error, None) from error
        self.end_wait(mark, begin_seconds)

    @contextmanager
    def publishing_errors(self, where: str) -> Iterator[None]:
        """Wrap the user's code: publish an exception of this rank to the ranks that will wait for it."""
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

    def report_wait(self, mark: Mark, **fields: Any) -> Report:
        """The report that this rank waits in `mark`."""
        return self.report(
            waits_in=self.call(mark.key),
            number=mark.number,
            serial=mark.serial,
            shape=mark.shape,
            place=place_text(mark.place),
            members=mark.members,
            **fields,
        )

    def report(self, **fields: Any) -> Report:
        from .diagnosis import Report

        counts: Counter[str] = Counter()
        for key, number in list(self._counts.items()):
            counts[self.call(key)] += number
        recent = [self.call(mark.key) for mark in list(self.ring)]
        return Report(self.rank, self.engine, counts=dict(counts), recent=recent, **fields)

    def call(self, key: tuple[str, int, str]) -> str:
        """E.g. "all_gather of unit 'blocks.5'"."""
        kind, buffer, what = key
        return f"{kind} of {what or self._names.get(buffer, f'flat buffer {buffer}')}"

    @property
    def has_published(self) -> bool:
        """Whether the store holds a report of this rank."""
        return self._has_published

    # -- through the store ------------------------------------------------------------------------------

    def exchange(self) -> Exchange | None:
        """The exchange through the group's store; None where there is no store."""
        from .exchange import Exchange

        store = self.open_store()
        return None if store is None else Exchange(store, self.rank, self.world_size, self.engine)

    def _withdraw(self) -> None:
        """Delete this rank's report: it continued, and the report must not explain a later failure."""
        self._has_published = False
        exchange = self.exchange()
        if exchange is not None and not self._diagnosis:
            try:
                exchange.withdraw()
            except RuntimeError:
                return

    def _diagnose(self, mine: Report) -> str:
        """The diagnosis without a sentinel, from the reports that other ranks publish."""
        from .diagnosis import explain
        from .exchange import PATIENCE_SECONDS, Exchange

        store, reports = self.open_store(), {self.rank: mine}
        if store is not None:
            deadline = time.monotonic() + PATIENCE_SECONDS
            try:
                # another thread may wait for a key of torch's, which would block this connection
                own = store.own_connection()
                exchange = Exchange(own, self.rank, self.world_size, self.engine)
                exchange.publish(mine)
                self._has_published = True
                reports = exchange.collect(mine, deadline)
                exchange.wait_for_readers(reports, deadline)
            except RuntimeError:
                pass  # the store is not reachable any more
        return explain(list(reports.values()), self.world_size, None, self.places)
