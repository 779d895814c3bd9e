"""What an engine does when its process is asked to stop: nothing, or save first.

There is one desk (preemption_desk.py) for all engines of a process that save.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, final

from ..ops.collectives import Collectives
from ..ops.errors import UsageError
from ..ops.watch.board import own_connection
from .config_checkpoint import Checkpoint
from .preemption_desk import Desk, Preempted, Seat

if TYPE_CHECKING:
    from .engine import Engine

_desk: Desk | None = None  # of this process, while an engine needs it


class Preemption(ABC):
    """One engine's part."""

    @abstractmethod
    def begin(self, engine: Engine) -> None:
        """The engine is ready."""

    @abstractmethod
    def boundary(self) -> None:
        """A step is over. After a signal it may be the last one; then all states are saved here."""

    @abstractmethod
    def check(self) -> None:
        """A step begins. Raises Preempted, once all states are saved."""

    @abstractmethod
    def end(self) -> None:
        """The engine takes no more steps."""


@final
class NotAsked(Preemption):
    """A signal does what it does without an engine."""

    def begin(self, engine: Engine) -> None:
        return

    def boundary(self) -> None:
        return

    def check(self) -> None:
        return

    def end(self) -> None:
        return


@final
class SavesFirst(Preemption):
    """After a signal to any rank, all ranks save at the same step and leave."""

    def __init__(self, section: Checkpoint, collectives: Collectives) -> None:
        """Raises UsageError: the ranks have no store to agree in."""
        self._section, self._collectives = section, collectives
        store = collectives.board() if collectives.world_size > 1 else None
        if collectives.world_size > 1 and store is None:
            raise UsageError(
                f'checkpoint.preemption_save_dir = "{section.preemption_save_dir}": the ranks agree in the '
                "store of their process group, and this one has none; leave it empty"
            )
        self._board = own_connection(store) if store is not None else None
        self._desk: Desk | None = None
        self._seat: Seat | None = None

    def begin(self, engine: Engine) -> None:
        global _desk
        section = self._section
        seat = Seat(
            weakref.ref(engine),
            section.preemption_save_dir,
            section.preemption_seconds,
            self._collectives,
            self._board,
        )
        desk = _desk or Desk()
        desk.join(seat)
        _desk, self._desk, self._seat = desk, desk, seat

    def boundary(self) -> None:
        if self._desk is not None and self._seat is not None:
            self._desk.boundary(self._seat)

    def check(self) -> None:
        if self._desk is not None:
            self._desk.check()

    def end(self) -> None:
        global _desk
        desk, self._desk = self._desk, None
        if desk is not None and self._seat is not None and desk.leave(self._seat) and _desk is desk:
            _desk = None


__all__ = ["NotAsked", "Preempted", "Preemption", "SavesFirst"]
