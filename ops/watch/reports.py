"""Exchanges reports between the ranks of one engine, through the store of their group.

xds/waits/{rank}            a rank's own report: its wait failed, or its script raised
xds/alarm/{engine}          the number of the newest alarm; each rank's watcher thread then writes
xds/answers/{engine}/{rank} the current position of its rank
xds/beat/{engine}/{rank}    a heartbeat with the step times
xds/read/{engine}/{rank}    the newest alarm for which the rank has read the other reports
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from pydantic import TypeAdapter

from .diagnosis import RankReport
from .store import Store

PATIENCE_SECONDS = 3.0  # for ranks that fail a little later than this one
REPORTED_SECONDS = PATIENCE_SECONDS + 1.5  # the same for the thread that collects the reports
POLL_SECONDS = 0.05


@final
@dataclass(frozen=True)
class Beat:
    """A heartbeat. at: seconds since 1970. steps: as of `Steps.totals`. left: the rank destroys its engine."""

    at: float
    host: str = ""
    steps: Sequence[tuple[int, float, float]] = ()
    left: bool = False


_REPORT, _BEAT, _NUMBER = TypeAdapter(RankReport), TypeAdapter(Beat), TypeAdapter(int)


@final
class ReportExchange:
    """One rank's view of the store. Every method may raise RuntimeError: the store is not reachable."""

    def __init__(self, store: Store, rank: int, world_size: int, engine: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.engine = engine

    def publish(self, report: RankReport) -> None:
        """Write this rank's own report."""
        self.store.set(f"xds/waits/{self.rank}", json.dumps(vars(report)))

    def withdraw(self) -> None:
        """Delete this rank's own report."""
        self.store.delete(f"xds/waits/{self.rank}")

    def answer(self, report: RankReport) -> None:
        """Write the watcher thread's report about its rank."""
        self.store.set(f"xds/answers/{self.engine}/{self.rank}", json.dumps(vars(report)))

    def alarm(self) -> int:
        """The number of the newest alarm; 0 where there was none."""
        return self.store.read_as(_NUMBER, f"xds/alarm/{self.engine}") or 0

    def raise_alarm(self, number: int) -> None:
        self.store.set(f"xds/alarm/{self.engine}", str(number))

    def beat(self, beat: Beat) -> None:
        self.store.set(self._beat_key(self.rank), json.dumps(vars(beat)))

    def beats(self) -> dict[int, Beat]:
        """The newest heartbeat of every rank; {} until all ranks have sent one."""
        keys = [self._beat_key(rank) for rank in range(self.world_size)]
        return dict(enumerate(self.store.read_all_as(_BEAT, keys)))

    def silences(self, reports: dict[int, RankReport]) -> dict[int, float | None]:
        """Seconds since the last heartbeat of each rank without a report; None: it destroyed its engine."""
        found: dict[int, float | None] = {}
        for rank in range(self.world_size):
            if rank not in reports:
                beat = self.store.read_as(_BEAT, self._beat_key(rank))
                if beat is not None:
                    found[rank] = None if beat.left else max(0.0, time.time() - beat.at)
        return found

    def collect(
        self,
        mine: RankReport,
        deadline: float,
        alarm: int = 0,
        stops: Callable[[], bool] = lambda: False,
    ) -> dict[int, RankReport]:
        """The reports of all ranks, by rank. Returns early when none is missing, or `stops` returns True."""
        reports = {self.rank: mine}
        try:
            while self._add(reports, alarm) and time.monotonic() < deadline and not stops():
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            pass  # the rank of the store ended: use the reports that were read so far
        return dict(sorted(reports.items()))

    def has_read(self, alarm: int = 0) -> None:
        """Tell the others that this rank has read their reports."""
        self.store.set(f"xds/read/{self.engine}/{self.rank}", str(alarm))

    def wait_for_readers(
        self, reports: dict[int, RankReport], deadline: float, alarm: int = 0
    ) -> None:
        """Wait until the ranks that reported have read all reports: this process may host the store."""
        try:
            self.has_read(alarm)
            others = [rank for rank, each in reports.items() if not (each.raised or each.left)]
            while others and time.monotonic() < deadline:
                number = self.store.read_as(_NUMBER, f"xds/read/{self.engine}/{others[-1]}")
                if number is not None and number >= alarm:
                    others.pop()
                else:
                    time.sleep(POLL_SECONDS)
        except RuntimeError:
            return

    def _add(self, reports: dict[int, RankReport], alarm: int) -> bool:
        """Add the new reports of other ranks. Returns True while a report is missing."""
        for rank in range(self.world_size):
            if rank in reports:
                continue
            report = self.store.read_as(_REPORT, f"xds/waits/{rank}")
            if report is None and alarm:
                report = self.store.read_as(_REPORT, f"xds/answers/{self.engine}/{rank}")
            if report is not None and report.rank == rank:
                if report.alarm < 0 or report.alarm >= alarm:
                    reports[rank] = report
        return len(reports) < self.world_size

    def _beat_key(self, rank: int) -> str:
        return f"xds/beat/{self.engine}/{rank}"
