"""Reports of one engine's ranks through the store of their group: words of the ranks, answers of their threads.

xds/waits/{rank}            what a rank says of itself: its wait failed, or its script raised
xds/alarm/{engine}          the number of the newest alarm; each rank's thread then writes
xds/answers/{engine}/{rank} where its rank is
xds/beat/{engine}/{rank}    that it lives, and how its steps go
xds/read/{rank}             it has read the others' reports
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, final

from .diagnosis import Report
from .store import Store

PATIENCE_SECONDS = 3.0  # for ranks that fail a little later than this one
POLL_SECONDS = 0.05


@final
class Exchange:
    """One rank's view of the store. Every method may raise RuntimeError: the store is gone."""

    def __init__(self, store: Store, rank: int, world_size: int, engine: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.engine = engine

    def say(self, report: Report) -> None:
        """This rank's own words."""
        self.store.set(f"xds/waits/{self.rank}", json.dumps(vars(report)))

    def take_back(self) -> None:
        self.store.delete_key(f"xds/waits/{self.rank}")

    def answer(self, report: Report) -> None:
        """This rank's thread says where its rank is."""
        self.store.set(f"xds/answers/{self.engine}/{self.rank}", json.dumps(vars(report)))

    def alarm(self) -> int:
        """The number of the newest alarm; 0 for none yet."""
        return int(self._read(f"xds/alarm/{self.engine}") or 0)

    def raise_alarm(self, number: int) -> None:
        self.store.set(f"xds/alarm/{self.engine}", str(number))

    def beat(self, **fields: Any) -> None:
        self.store.set(self._beat_key(self.rank), json.dumps({"at": time.time(), **fields}))

    def beats(self) -> dict[int, dict[str, Any]]:
        """The newest beat of every rank; {} until all have given one."""
        keys = [self._beat_key(rank) for rank in range(self.world_size)]
        if not self.store.check(keys):
            return {}
        many = getattr(self.store, "multi_get", None)
        values = many(keys) if many is not None else [self.store.get(key) for key in keys]
        return {rank: json.loads(value) for rank, value in enumerate(values)}

    def silences(self, reports: dict[int, Report]) -> dict[int, float | None]:
        """Seconds without a sign of life of who did not report; None: it destroyed its engine."""
        found: dict[int, float | None] = {}
        for rank in range(self.world_size):
            said = None if rank in reports else self._read(self._beat_key(rank))
            if said:
                beat = json.loads(said)
                found[rank] = None if beat.get("left") else max(0.0, time.time() - beat["at"])
        return found

    def collect(
        self,
        mine: Report,
        deadline: float,
        alarm: int = 0,
        stops: Callable[[], bool] = lambda: False,
    ) -> dict[int, Report]:
        """Everybody's reports, by rank; returns early when nobody is missing, or at `stops`."""
        reports = {self.rank: mine}
        try:
            while self._add(reports, alarm) and time.monotonic() < deadline and not stops():
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            pass  # the store went with its rank: what was read so far is what there is
        return dict(sorted(reports.items()))

    def stay(self, reports: dict[int, Report], deadline: float) -> None:
        """The store may live in this process: stay until those who spoke have read."""
        try:
            self.store.set(f"xds/read/{self.rank}", "")
            others = [f"xds/read/{rank}" for rank in reports if not reports[rank].raised]
            while not self.store.check(others) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            return

    def _add(self, reports: dict[int, Report], alarm: int) -> bool:
        """Add what others have said; True while somebody has not."""
        for rank in range(self.world_size):
            if rank in reports:
                continue
            said = self._read(f"xds/waits/{rank}")
            if said is None and alarm:
                said = self._read(f"xds/answers/{self.engine}/{rank}")
            if said is not None:
                report = Report(**json.loads(said))
                if report.alarm < 0 or report.alarm >= alarm:
                    reports[rank] = report
        return len(reports) < self.world_size

    def _read(self, key: str) -> bytes | None:
        return self.store.get(key) if self.store.check([key]) else None

    def _beat_key(self, rank: int) -> str:
        return f"xds/beat/{self.engine}/{rank}"
