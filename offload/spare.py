"""Spare host memory for updates that may have to be undone. Its size has a limit."""

from __future__ import annotations

import os
from typing import final

from torch import Tensor

from ..utils.available_memory import available_bytes
from .pinned import host_memory

# Backward takes two to three times as long as forward. So at most this share of the updates can be hidden
# behind it while the rest is hidden behind forward.
MAX_SHARE = 0.75
MAX_SHARE_OF_FREE = 0.5  # of the free memory that this rank has


@final
class Spare:
    """Memory for the old values of updates, as much as `limit_bytes` in all.

    limit_bytes: None computes it at the first call of `allocate`, from the free memory of the machine.
    """

    def __init__(self, *, pin: bool, limit_bytes: int | None = None) -> None:
        self.allocated_bytes = 0
        self._pin = pin
        self._limit_bytes = limit_bytes

    def allocate(self, num_bytes: int, *, copied: bool = False) -> Tensor | None:
        """A uint8 tensor of shape [num_bytes] that the caller keeps; None if the limit is reached.

        copied: it is copied to the device, so it is pinned.
        """
        if self._limit_bytes is None:
            self._limit_bytes = _free_bytes_of_rank()
        if self.allocated_bytes + num_bytes > self._limit_bytes:
            return None
        self.allocated_bytes += num_bytes
        return host_memory(num_bytes, pin=self._pin and copied)

    def give_up(self, num_bytes: int) -> None:
        """The caller has freed memory of this size."""
        self.allocated_bytes -= num_bytes


def _free_bytes_of_rank() -> int:
    ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return int(available_bytes() * MAX_SHARE_OF_FREE / ranks_here)


__all__ = ["MAX_SHARE", "Spare"]
