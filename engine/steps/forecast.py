"""Whether the next step is likely to be neither clipped nor skipped, from the norms of the last ones."""

from __future__ import annotations

import math
from collections import deque
from typing import final

NUM_NORMS = 8  # recent steps that count
NEAR_LIMIT = 0.8  # of the clipping limit


@final
class Forecast:
    """Watches the gradient norms of one engine."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=NUM_NORMS)

    def observe(self, norm: float) -> None:
        """A step had this norm; inf or nan if it was skipped."""
        self._norms.append(norm)

    def is_plain(self, limit: float) -> bool:
        """No recent step was skipped, and no norm came near `limit`; 0 is none."""
        if not self._norms:
            return False
        highest = max(norm if math.isfinite(norm) else math.inf for norm in self._norms)
        return highest < NEAR_LIMIT * limit if limit else math.isfinite(highest)


__all__ = ["NEAR_LIMIT", "NUM_NORMS", "Forecast"]
