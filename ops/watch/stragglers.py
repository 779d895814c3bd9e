"""Finds slow ranks: every rank publishes its step times, and rank 0 compares them over the same steps.

    wall time of a step = compute (all time outside of waits) + wait (inside collectives)

A slow rank computes longer than its peers, and they wait longer than it does. Each rank keeps (step, wall,
wait) totals at multiples of 4, 32, 256, ... steps. So ranks whose totals are read at different moments have
steps in common, however short the steps are. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import final

from ...utils.quoting import printable

WINDOWS = (
    3  # how many windows in a row a rank must be slow, or no longer slow, before it is reported
)
MIN_WINDOW_SECONDS = 0.2
MIN_WAIT_SHARE = 0.5  # share of the excess compute time that the other ranks must have waited

Total = tuple[float, float]  # wall seconds and wait seconds since the first step


@final
@dataclass(frozen=True)
class SpeedChange:
    """A rank became slow, or is no longer slow. Seconds are per step."""

    rank: int
    is_slow: bool
    compute_seconds: float
    median_seconds: float
    waited_seconds: float

    def message(self, host: str) -> str:
        where = f"rank {self.rank}" + (f" (host {printable(host)})" if host else "")
        if not self.is_slow:
            return f"{where} is no longer slower than its peers"
        return (
            f"{where} is slower than its peers: compute {self.compute_seconds:.3f} s per step, median "
            f"{self.median_seconds:.3f}; the others waited {self.waited_seconds:.3f} s for it"
        )


@final
class StragglerDetector:
    """Compares the step times of all ranks, and remembers which ranks are slow."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._totals: dict[int, dict[int, Total]] = {}  # step -> rank -> total
        self._begin: dict[int, Total] | None = None  # of the current window
        self._begin_step = 0
        # windows in a row in which the rank's state differs from `_slow`
        self._streaks: dict[int, int] = {}
        self._slow: set[int] = set()

    def compare(self, published: Mapping[int, Sequence[Sequence[float]]]) -> list[SpeedChange]:
        """The changes since the last call, from the totals that every rank has published."""
        for rank, totals in published.items():
            for step, wall, wait in totals:
                if step > self._begin_step:
                    self._totals.setdefault(int(step), {})[rank] = (wall, wait)
        changes: list[SpeedChange] = []
        for step in sorted(s for s, ranks in self._totals.items() if len(ranks) == len(published)):
            changes += self._close(step, self._totals[step])
        self._totals = {s: ranks for s, ranks in self._totals.items() if s > self._begin_step}
        return changes

    def _close(self, step: int, end: dict[int, Total]) -> list[SpeedChange]:
        """End the window at `step`, unless it is still too short."""
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
        found = [self._state(rank, computes, waits) for rank in computes]
        return [state for state in found if self._is_change(state)]

    def _state(
        self, rank: int, computes: Mapping[int, float], waits: Mapping[int, float]
    ) -> SpeedChange:
        peers = [other for other in computes if other != rank]
        usual = median(computes[peer] for peer in peers)
        waited = fmean(waits[peer] for peer in peers) - waits[rank]
        excess = computes[rank] - usual
        is_slow = computes[rank] > self._ratio * usual and waited > MIN_WAIT_SHARE * excess
        return SpeedChange(rank, is_slow, computes[rank], usual, max(0.0, waited))

    def _is_change(self, state: SpeedChange) -> bool:
        rank = state.rank
        if state.is_slow == (rank in self._slow):
            self._streaks.pop(rank, None)
            return False
        self._streaks[rank] = self._streaks.get(rank, 0) + 1
        if self._streaks[rank] < WINDOWS:
            return False
        del self._streaks[rank]
        (self._slow.add if state.is_slow else self._slow.discard)(rank)
        return True
