"""Who is slow: each rank tells how its steps went, and one compares them over the same steps. Pure arithmetic.

    wall of a step = compute (everything that is no waiting) + wait (inside collectives)

A slow rank computes longer than its peers while they wait longer than it. Each rank keeps (step, wall, wait)
totals at multiples of 4, 32, 256, ... steps, so that ranks that are looked at at different moments have steps
in common, however short these are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import final

STRIDES = (4, 32, 256, 2048, 16384)  # steps
KEPT = 4  # totals of each stride
WINDOWS = 3  # in a row in which a rank is slow before it is named, and keeps up before that is said
MIN_WINDOW_SECONDS = 0.2
MIN_BLAME = 0.5  # share of its excess that the others must have waited

Total = tuple[float, float]  # seconds of wall and of waiting, since the first step


@final
class Steps:
    """This rank's steps: totals at some of them."""

    def __init__(self) -> None:
        self.count = 0
        self._begin_seconds = 0.0
        self._kept: dict[int, deque[tuple[int, float, float]]] = {
            stride: deque(maxlen=KEPT) for stride in STRIDES
        }

    def add(self, now_seconds: float, waited_seconds: float) -> None:
        """A step is over; `waited_seconds` is the total of all waiting so far."""
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

    def told(self) -> list[tuple[int, float, float]]:
        """(step, wall, wait), JSON, in no order."""
        return sorted({total for kept in self._kept.values() for total in list(kept)})


@final
@dataclass(frozen=True)
class Verdict:
    """About one rank, each time that it changes. Seconds are of one step."""

    rank: int
    is_slow: bool
    compute_seconds: float
    median_seconds: float
    waited_seconds: float

    def told(self, host: str) -> str:
        where = f"rank {self.rank}" + (f" (host {host})" if host else "")
        if not self.is_slow:
            return f"{where} keeps up with its peers again"
        return (
            f"{where} is slower than its peers: compute {self.compute_seconds:.3f} s a step, median "
            f"{self.median_seconds:.3f}; the others waited {self.waited_seconds:.3f} s for it"
        )


@final
class Judge:
    """Compares all ranks; remembers which ones are slow."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._totals: dict[int, dict[int, Total]] = {}  # step -> rank -> total
        self._begin: dict[int, Total] | None = None  # of the window under way
        self._begin_step = 0
        self._streaks: dict[int, int] = {}  # windows in a row in which the rank is not what it was
        self._slow: set[int] = set()

    def look(self, told: Mapping[int, Sequence[Sequence[float]]]) -> list[Verdict]:
        """What changed, by what every rank has told, by rank."""
        for rank, totals in told.items():
            for step, wall, wait in totals:
                if step > self._begin_step:
                    self._totals.setdefault(int(step), {})[rank] = (wall, wait)
        verdicts: list[Verdict] = []
        for step in sorted(s for s, ranks in self._totals.items() if len(ranks) == len(told)):
            verdicts += self._close(step, self._totals[step])
        self._totals = {s: ranks for s, ranks in self._totals.items() if s > self._begin_step}
        return verdicts

    def _close(self, step: int, end: dict[int, Total]) -> list[Verdict]:
        """End the window at `step`, unless it is too short yet."""
        begin, count = self._begin, step - self._begin_step
        if begin is not None:
            if min(end[rank][0] - begin[rank][0] for rank in end) < MIN_WINDOW_SECONDS:
                return []
        self._begin, self._begin_step = end, step
        if begin is None or begin.keys() != end.keys() or len(end) < 2:
            return []
        waits = {rank: (end[rank][1] - begin[rank][1]) / count for rank in end}
        computes = {
            rank: (end[rank][0] - begin[rank][0]) / count - waits[rank] for rank in sorted(end)
        }
        found = [self._verdict(rank, computes, waits) for rank in computes]
        return [verdict for verdict in found if self._is_news(verdict)]

    def _verdict(
        self, rank: int, computes: Mapping[int, float], waits: Mapping[int, float]
    ) -> Verdict:
        peers = [other for other in computes if other != rank]
        usual = median(computes[peer] for peer in peers)
        waited = fmean(waits[peer] for peer in peers) - waits[rank]
        excess = computes[rank] - usual
        is_slow = computes[rank] > self._ratio * usual and waited > MIN_BLAME * excess
        return Verdict(rank, is_slow, computes[rank], usual, max(0.0, waited))

    def _is_news(self, verdict: Verdict) -> bool:
        rank = verdict.rank
        if verdict.is_slow == (rank in self._slow):
            self._streaks.pop(rank, None)
            return False
        self._streaks[rank] = self._streaks.get(rank, 0) + 1
        if self._streaks[rank] < WINDOWS:
            return False
        del self._streaks[rank]
        (self._slow.add if verdict.is_slow else self._slow.discard)(rank)
        return True
