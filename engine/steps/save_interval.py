"""When it is time for a checkpoint, on all ranks after the same step: `checkpoint.interval`.

The clock of rank 0 decides. It says so in the small message that every step sends anyway, until a checkpoint is
saved. So `engine.should_save()` is the same on all ranks, and nothing more is sent.

"auto" takes the interval for which the largest share of time trains (engine/planning/goodput.py), from

- the seconds for which the last saves stopped training, and
- the failures so far. Before there are any, one in 50,700 GPU-hours is assumed: that of Llama 3 (2024), 419 in
  54 days on 16,384 GPUs. With k failures in h rank-hours the estimate is (50,700 + h) / (1 + k) for a rank.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from typing import final

from ...ops.comm.collectives import Collectives
from ...zero.core.reduction import StepStatus
from ..parts import SaveInterval
from ..planning.goodput import best_interval_seconds

PRIOR_HOURS = 50_700.0  # of one GPU, between two failures
FIRST_SECONDS = 600.0  # until a first save, which measures what saves cost
NUM_SAVES = 4  # recent ones that count


@final
class TimedSaves(SaveInterval):
    """The interval of one engine. Every rank keeps the time: with recovery another one may be rank 0."""

    def __init__(self, interval: float | str, collectives: Collectives) -> None:
        """interval: seconds, or "auto"."""
        self._collectives = collectives
        self._given = None if isinstance(interval, str) else interval
        self._saves: deque[float] = deque(maxlen=NUM_SAVES)
        self._failures = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self._began_seconds = float(os.environ.get("XDS_RUN_BEGAN", time.time()))
        self._since_seconds = time.monotonic()
        self._is_due = False
        self.seconds = self._interval()

    @property
    def is_asked(self) -> bool:  # type: ignore[override]
        if self._collectives.rank:
            return False
        return time.monotonic() - self._since_seconds >= self.seconds

    def agree(self, status: StepStatus) -> None:
        self._is_due = status.saves

    def is_due(self) -> bool:
        return self._is_due

    def saved(self, seconds: float) -> None:
        self._saves.append(seconds)
        self._is_due, self._since_seconds = False, time.monotonic()
        self.seconds = self._interval()

    def dropped(self) -> None:
        self._is_due = False
        self._failures += 1
        self.seconds = self._interval()

    def _interval(self) -> float:
        """Seconds from the end of a save to the next one."""
        if self._given is not None:
            return self._given
        ranks = self._collectives.world_size
        hours = max(0.0, time.time() - self._began_seconds) / 3600 * ranks
        failure_seconds = 3600 * (PRIOR_HOURS + hours) / (1 + self._failures) / ranks
        if self._saves:
            return best_interval_seconds(failure_seconds, statistics.mean(self._saves))
        return min(FIRST_SECONDS, failure_seconds)


__all__ = ["TimedSaves"]
