"""What stays in memory after user code has read it: the last few, until others are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from .file import Ticket
from .transfers import wait_quietly

NUM_KEPT = 2  # a master is read while the one before it is still used
WRITES_IN_FLIGHT = 2


class Movable(ABC):
    """Something in memory that has a place in the file."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of memory in use, without slots of the ring."""

    @abstractmethod
    def move_away(self) -> Ticket:
        """Start to write it to the file, and give up its memory."""


@final
class Kept:
    """Used by one thread, user code's. Errors of writes are kept by who has written."""

    def __init__(self) -> None:
        self._kept: dict[int, Movable] = {}  # by id, the last one used is last
        self._writes: deque[Ticket] = deque()
        self._holds = 0

    def note(self, one: Movable) -> None:
        """It is in memory and used now. Others that were not used for long are moved away."""
        self._kept.pop(id(one), None)
        self._kept[id(one)] = one
        while len(self._kept) > NUM_KEPT and not self._holds:
            self._move_oldest()

    def forget(self, one: Movable) -> None:
        """An update moves it away."""
        self._kept.pop(id(one), None)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, everything stays in memory; on exit all of it is moved away."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            while self._kept and not self._holds:
                self._move_oldest()

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory in use."""
        return sum(one.memory_bytes for one in self._kept.values())

    def _move_oldest(self) -> None:
        one = self._kept.pop(next(iter(self._kept)))
        self._writes.append(one.move_away())
        while len(self._writes) > WRITES_IN_FLIGHT:  # their memory is in use until then
            wait_quietly(self._writes.popleft())


__all__ = ["Kept", "Movable"]
