"""What an engine does when its process gets a signal to stop: nothing, or save a checkpoint first.

All engines of a process that save share one coordinator (coordinator.py).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import final

from ...ops.comm.collectives import Collectives
from ...utils.errors import UsageError
from ..config.sections import Checkpoint
from .coordinator import Coordinator, Participant, Preempted, Saving

_coordinator: Coordinator | None = None  # of this process, while an engine needs it


class Preemption(ABC):
    """How one engine reacts to a signal to stop."""

    @abstractmethod
    def begin(self, engine: Saving) -> None:
        """The engine is ready."""

    @abstractmethod
    def boundary(self) -> None:
        """A step has ended. If it is the last step after a signal, all states are saved here."""

    @abstractmethod
    def check(self) -> None:
        """A step begins. Raises Preempted if all states are saved."""

    @abstractmethod
    def end(self) -> None:
        """The engine takes no more steps."""


@final
class NoPreemptionSave(Preemption):
    """A signal has its usual effect on the process."""

    def begin(self, engine: Saving) -> None:
        return

    def boundary(self) -> None:
        return

    def check(self) -> None:
        return

    def end(self) -> None:
        return


@final
class SaveOnPreemption(Preemption):
    """After a signal to any rank, all ranks save at the same step and exit."""

    def __init__(self, section: Checkpoint, collectives: Collectives) -> None:
        """Raises UsageError: the process group has no store, in which the ranks agree on the step."""
        self._section, self._collectives = section, collectives
        store = collectives.store() if collectives.world_size > 1 else None
        if collectives.world_size > 1 and store is None:
            raise UsageError(
                f'checkpoint.preemption_save_dir = "{section.preemption_save_dir}": the ranks agree in the '
                "store of their process group, and this group has none; leave it empty"
            )
        self._store = store.own_connection() if store is not None else None
        self._coordinator: Coordinator | None = None
        self._participant: Participant | None = None

    def begin(self, engine: Saving) -> None:
        global _coordinator
        section = self._section
        participant = Participant(
            weakref.ref(engine),
            section.preemption_save_dir,
            section.preemption_seconds,
            self._collectives,
            self._store,
        )
        coordinator = _coordinator or Coordinator()
        coordinator.join(participant)
        _coordinator, self._coordinator, self._participant = coordinator, coordinator, participant

    def boundary(self) -> None:
        if self._coordinator is not None and self._participant is not None:
            self._coordinator.boundary(self._participant)

    def check(self) -> None:
        if self._coordinator is not None:
            self._coordinator.check()

    def end(self) -> None:
        global _coordinator
        coordinator, self._coordinator = self._coordinator, None
        if (
            coordinator is not None
            and self._participant is not None
            and coordinator.leave(self._participant)
            and _coordinator is coordinator
        ):
            _coordinator = None


__all__ = ["NoPreemptionSave", "Preempted", "Preemption", "SaveOnPreemption"]
