"""Whether a script wrote to a gathered buffer whose shard is on the host: copies to the host are rare.

On a device, asking at each drop would wait for it each time. So only the first drops ask, and all later ones of
a buffer that a script writes to. For the others see `take_lost`.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from ...ops.fingerprint import fingerprint

CHECKED_DROPS = 8


def drops_to_check(device: torch.device) -> float:
    """With offload_param: the number of drops of a buffer that look for a script's writes at once."""
    return math.inf if device.type == "cpu" else CHECKED_DROPS


@final
class GatheredWrites:
    """Compares this rank's part of a gathered buffer with what was gathered."""

    def __init__(self) -> None:
        self._gathered: Tensor | None = None  # the fingerprint of the part that was fetched
        self._num_checked = 0  # drops whose fingerprint was read
        self._was_written = False
        self._lost: Tensor | None = None

    def remember(self, own: Tensor) -> None:
        """`own` [n] was gathered."""
        self._gathered = fingerprint(own)

    def are_in(self, own: Tensor, *, checks_now: bool) -> bool:
        """A script has written to `own` [n]; False also where that is not asked yet."""
        now = fingerprint(own)
        if self._gathered is None:
            return True
        if checks_now or self._was_written or self._num_checked < drops_to_check(now.device):
            self._num_checked += 1
            is_written = bool(now != self._gathered)
            self._was_written |= is_written
            return is_written
        lost = now != self._gathered
        self._lost = lost if self._lost is None else self._lost | lost
        return False

    def take_lost(self) -> Tensor | None:
        """Whether a write was dropped since the last call, bool []; None: no drop went unchecked."""
        lost, self._lost = self._lost, None
        return lost

    def check_always(self) -> None:
        """From now on each drop looks for writes."""
        self._was_written = True


__all__ = ["CHECKED_DROPS", "GatheredWrites", "drops_to_check"]
