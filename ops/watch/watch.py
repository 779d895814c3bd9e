"""One engine's collectives on this rank: counted, kept in a ring, and explained when a wait fails.

    wait fails -> this rank's report -> the group's store -> everybody's reports -> one sentence, one PeerError

Until then a collective costs a count, an entry in the ring and a look for the script's line. Nothing is
formatted and nothing is sent before something fails.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, final

from ...utils.errors import PeerError
from .device import Probe
from .diagnosis import Report, explain
from .exchange import PATIENCE_SECONDS, Exchange
from .ring import Mark, place_of_caller, told_place
from .store import Store
from .stragglers import Steps

if TYPE_CHECKING:
    from torch import Tensor

RING_SIZE = 128  # collectives a rank remembers, unless the config says otherwise


class Asker(Protocol):
    """The sentinel's side of a watch: it asks all ranks where they are."""

    def ask(self, report: Report) -> str:
        """The sentence about all ranks; takes a little more than `PATIENCE_SECONDS` at most."""


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
        self.waiting: tuple[Mark, float] | None = None  # the wait under way, and its begin
        self.is_failing = False
        self.waited_seconds = 0.0
        self.steps = Steps()
        self.thread = threading.main_thread().ident or 0  # that trains
        self.asker: Asker | None = None
        self.probe: Probe | None = None  # where a wait returns before the work is done
        self._names: dict[int, str] = {}
        self._counts: dict[tuple[str, int, str], int] = {}
        self._serial = 0
        self._has_spoken = False
        self._verdict = ""

    def keep(self, ring_size: int) -> None:
        """So many collectives are remembered from now on."""
        self.ring = deque(self.ring, maxlen=ring_size)

    def name(self, buffer: int, name: str) -> None:
        """From now on `buffer` is called `name` in messages."""
        taken = name in self._names.values()
        self._names[buffer] = f"{name} (buffer {buffer})" if taken else name

    def start(self, kind: str, buffer: int, what: str = "", tensor: Tensor | None = None) -> Mark:
        """This rank starts a collective of `buffer`, with `tensor`; `what` says more where these do not."""
        if self._has_spoken:
            self._take_back()
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
        """This rank waits in `mark` from now on."""
        now = time.monotonic()
        self.waiting = (mark, now)
        return now

    def end_wait(self, mark: Mark, begin_seconds: float) -> None:
        """What was `begin_seconds` when it began is over."""
        mark.ended_seconds = now = time.monotonic()
        self.waited_seconds += now - begin_seconds
        self.waiting = None

    def step(self) -> None:
        """A step is over."""
        self.thread = threading.get_ident()
        self.steps.add(time.monotonic(), self.waited_seconds)

    def failed(self, mark: Mark, error: RuntimeError, peer: int | None) -> PeerError:
        """The error to raise for a wait in `mark` that failed; takes `PATIENCE_SECONDS` at most.

        Args:
            error: what the backend said; peer: the rank it said so about, if it is known.
        """
        if not self._verdict:
            self.is_failing = True
            said = str(error)
            if peer is None and self.world_size == 2:
                peer = 1 - self.rank
            # a peer that gave up before us closes the connection as well, but it has said why
            is_closed = "Timed out" not in said and "Application timeout" not in said
            report = self.report_wait(mark, gone=peer if is_closed else None)
            told = self._ask(report) if self.asker is None else self.asker.ask(report)
            reason = said.split("\n")[0].rpartition("] ")[2].partition(". This is")[0].rstrip(". ")
            self._verdict = (
                f"{report.waits_in} failed on rank {self.rank} of {self.world_size} ({reason}). Another "
                f"rank stopped, or went another way through its code: {told}"
            )
        self.waiting = None
        return PeerError(self._verdict)  # a group does not recover: later waits fail of the same

    @contextmanager
    def guard(
        self, kind: str, buffer: int, what: str = "", tensor: Tensor | None = None
    ) -> Iterator[Mark]:
        """Around a collective that is over when it returns."""
        mark = self.start(kind, buffer, what, tensor)
        begin_seconds = self.begin_wait(mark)
        try:
            yield mark
        except RuntimeError as error:
            raise self.failed(mark, error, None) from error
        self.end_wait(mark, begin_seconds)

    @contextmanager
    def telling(self, where: str) -> Iterator[None]:
        """Around the user's code: what it raises on this rank is told to the ranks that will wait for it."""
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            said = "".join(traceback.format_exception_only(error)).partition("\n")[0]
            exchange = self.exchange()
            if exchange is not None:
                try:
                    exchange.say(self.report(raised=f"{said[:200]} in {where}"))
                    self._has_spoken = True
                except RuntimeError:
                    pass  # nobody answers at the store any more
            raise

    # -- what it says -----------------------------------------------------------------------------------

    def report_wait(self, mark: Mark, **fields: Any) -> Report:
        """This rank waits in `mark`."""
        return self.report(
            waits_in=self.call(mark.key),
            number=mark.number,
            serial=mark.serial,
            shape=mark.shape,
            place=told_place(mark.place),
            **fields,
        )

    def report(self, **fields: Any) -> Report:
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
    def has_spoken(self) -> bool:
        """This rank's own words stand in the store."""
        return self._has_spoken

    # -- through the store ------------------------------------------------------------------------------

    def exchange(self) -> Exchange | None:
        """None: there is no store."""
        store = self.open_store()
        return None if store is None else Exchange(store, self.rank, self.world_size, self.engine)

    def _take_back(self) -> None:
        """It went on after all: what it said must not explain a later failure."""
        self._has_spoken = False
        exchange = self.exchange()
        if exchange is not None and not self._verdict:
            try:
                exchange.take_back()
            except RuntimeError:
                return

    def _ask(self, mine: Report) -> str:
        """Without a sentinel: what other ranks say of themselves."""
        exchange, reports = self.exchange(), {self.rank: mine}
        if exchange is not None:
            deadline = time.monotonic() + PATIENCE_SECONDS
            try:
                exchange.say(mine)
                self._has_spoken = True
                reports = exchange.collect(mine, deadline)
                exchange.stay(reports, deadline)
            except RuntimeError:
                pass  # nobody answers there any more
        return explain(list(reports.values()), self.world_size)
