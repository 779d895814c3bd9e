"""Host memory that is used again: a GPU takes milliseconds to register it, and freeing waits for it."""

from __future__ import annotations

import threading
from typing import final

from torch import Tensor

from .interfaces import FinishedJob, JobHandle
from .pinned import host_memory

GROWTH = 1.5  # the least factor from a block to the larger one that replaces it


@final
class HostBlock:
    """Memory of the host. reader: the last copy out of it that was started."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.reader: JobHandle = FinishedJob()


@final
class HostPool:
    """Gives out blocks, pinned if `pin`: as many as were in use at the same time. Threads may share it."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._free: list[HostBlock] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> HostBlock:
        """A block of at least `num_bytes`. A copy into it has to come after its `reader`."""
        with self._lock:
            fitting = [block for block in self._free if block.memory.numel() >= num_bytes]
            largest = max(self._free, key=_size, default=None)
            block = min(fitting, key=_size) if fitting else largest
            if block is not None:
                self._free.remove(block)
        if block is None:
            return HostBlock(host_memory(num_bytes, pin=self._pin))
        if not fitting:  # a larger one replaces the largest
            roomy = int(GROWTH * block.memory.numel())
            return HostBlock(host_memory(max(num_bytes, roomy), pin=self._pin))
        return block

    def give(self, block: HostBlock) -> None:
        """Return `block`, of which no further copy is started."""
        with self._lock:
            self._free.append(block)


def _size(block: HostBlock) -> int:
    return block.memory.numel()


__all__ = ["HostBlock", "HostPool"]
