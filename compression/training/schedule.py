"""The state of each technique as a function of the number of optimizer steps, so that a resume needs no more.

Mixture of quantization (MoQ), DeepSpeed's rule: the bits of a weight fall by one after `period` steps, and the
period doubles. With a mixture the share of whole weights begins at 1 and falls by a constant in each step; it
is 1 again where a bit is dropped. Steps count from `schedule_offset`, where the first is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Falling:
    """How the bits of a weight fall. change: of the share of whole weights in a step; 0 without a mixture."""

    start: int
    target: int
    period: int
    change: float = 0.0

    def at(self, steps: int) -> tuple[int, float]:
        """(bits, share of whole weights) after `steps` steps, at least 1."""
        bits, period, since = self.start, self.period, 0
        while bits > self.target:
            drop = max(since + 1, period)
            if drop > steps:
                break
            bits, since, period = bits - 1, drop, 2 * period
        if not self.change:
            return bits, 0.0
        share = 1.0
        for _ in range(min(steps - since, math.ceil(1 / self.change) + 1)):
            share -= self.change
        return bits, max(share, 0.0)


__all__ = ["Falling"]
