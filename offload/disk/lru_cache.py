"""Keeps the last few masters in memory that user code has read, until it reads others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from .file import PendingRequest
from .transfers import wait_quietly

NUM_LOADED = 2  # a master is read while the one before it is still used
WRITES_IN_FLIGHT = 2


class Evictable(ABC):
    """Something in memory that has a place in the file."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of memory in use, without slots of the pool."""

    @abstractmethod
    def evict(self) -> PendingRequest:
        """Start to write it to the file, and give up its memory."""


@final
class LruCache:
    """Used by the thread of user code alone. Each item keeps the errors of its writes."""

    def __init__(self) -> None:
        self._loaded: dict[int, Evictable] = {}  # by id, the last one used is last
        self._writes: deque[PendingRequest] = deque()
        self._holds = 0

    def touch(self, used: Evictable) -> None:
        """`used` is in memory and used now. Those that were not used for long are evicted."""
        self._loaded.pop(id(used), None)
        self._loaded[id(used)] = used
        while len(self._loaded) > NUM_LOADED and not self._holds:
            self._evict_oldest()

    def remove(self, item: Evictable) -> None:
        """An update evicts `item`."""
        self._loaded.pop(id(item), None)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, everything stays in memory; on exit all of it is evicted."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            while self._loaded and not self._holds:
                self._evict_oldest()

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory in use."""
        return sum(item.memory_bytes for item in self._loaded.values())

    def _evict_oldest(self) -> None:
        oldest = self._loaded.pop(next(iter(self._loaded)))
        self._writes.append(oldest.evict())
        while len(self._writes) > WRITES_IN_FLIGHT:  # their memory is in use until then
            wait_quietly(self._writes.popleft())


__all__ = ["LruCache", "Evictable"]
