"""UndoPool host memory for updates that may have to be undone. Its size has a limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ..utils.host_memory import free_host_bytes
from .interfaces import FinishedJob, JobHandle
from .pinned import host_memory

MAX_SHARE_OF_FREE = 0.5  # of the free memory that this rank has


@final
class UndoBuffers:
    """Memory for one update: uint8, one tensor for each that it changes, and one for forward's new values."""

    def __init__(self, memory: Sequence[Tensor], values: Tensor) -> None:
        self.memory = list(memory)
        self._values = values
        self.reader: JobHandle = FinishedJob()  # of the values

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each."""
        return (*(each.numel() for each in self.memory), self._values.numel())

    def values(self, dtype: torch.dtype) -> Tensor:
        """[n] for new values, undefined."""
        return self._values.view(dtype)


@final
class UndoPool:
    """Gives out buffers, as much as `limit_bytes` in all. Threads may share it.

    limit_bytes: None computes it when it is first needed: half of the free memory of this rank.
    """

    def __init__(self, *, pin: bool, limit_bytes: int | None = None) -> None:
        self.allocated_bytes = 0
        self._pin = pin
        self._limit_bytes = limit_bytes
        self._free: list[UndoBuffers] = []
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int], values_bytes: int) -> UndoBuffers | None:
        """A buffers whose memory has exactly these sizes in bytes; None if the limit is reached."""
        wanted = (*sizes, values_bytes)
        with self._lock:
            for buffers in self._free:
                if buffers.sizes == wanted:
                    self._free.remove(buffers)
                    return buffers
            if self._limit_bytes is None:
                self._limit_bytes = _limit_of_rank()
            if self.allocated_bytes + sum(wanted) > self._limit_bytes:
                return None
            self.allocated_bytes += sum(wanted)
        # only the values are copied to the device
        memory = [host_memory(size, pin=False) for size in sizes]
        return UndoBuffers(memory, host_memory(values_bytes, pin=self._pin))

    def give(self, buffers: UndoBuffers) -> None:
        """Return `buffers`; its values may still be read until `buffers.reader` is done."""
        with self._lock:
            self._free.append(buffers)

    def release(self) -> None:
        """Free all buffers that were given back, and give out no more."""
        with self._lock:
            self._free, self._limit_bytes = [], 0


def _limit_of_rank() -> int:
    ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return int((free_host_bytes() or 0) * MAX_SHARE_OF_FREE / ranks_here)


__all__ = ["UndoBuffers", "UndoPool"]
