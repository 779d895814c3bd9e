"""Generations of the group of a run: who decides which units take part, and how they meet.

    launcher   Lighthouse   rank 2 has ended -> generation 1 has units 0, 1
    rank       Meeting      a collective has failed -> waits for generation 1, then for all of its units

One generation replaces another one as a whole. Each has a number, which is in the name of its groups and in
the key of every message. So a process that is not in the newest one finds no group to take part in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

from pydantic import TypeAdapter

from ..ops.watch.store import Store
from ..utils.errors import PeerError

PREFIX = "xds/recovery"
_JOINED = "joined"
# Folders with the states of a rank for another one. Their names have the process id of the launcher, which
# removes those of ranks that were killed.
SHARED_MEMORY, STATES_PREFIX = "/dev/shm", "xds-states-"
_POLL_SECONDS = 0.002  # between two looks for the others
_WAIT_SECONDS = 0.5  # of one wait for the next generation


@final
@dataclass(frozen=True)
class Generation:
    """The units that take part from now on.

    number: from 0, the start. units: their numbers at the start of the run, ascending; unit r is rank r then.
    reason: what happened, in words.
    """

    number: int
    units: tuple[int, ...]
    reason: str = ""


_KIND = TypeAdapter(Generation)


def _key(number: int) -> str:
    return f"{PREFIX}/generation/{number}"


def _ready_key(number: int, unit: int) -> str:
    return f"{PREFIX}/ready/{number}/{unit}"


def _join_key(unit: int, attempt: int) -> str:
    return f"{PREFIX}/join/{unit}/{attempt}"


@final
class Lighthouse:
    """Decides who is in a generation. One process of the run has it, which outlives the ranks: the launcher."""

    def __init__(self, store: Store, num_units: int) -> None:
        self.generation = Generation(0, tuple(range(num_units)))
        self._store = store
        self._min_units = 0

    @property
    def min_units(self) -> int:
        """The fewest units that go on; 0: some unit has not built its engine, so it cannot recover."""
        if not self._min_units:
            found = [self._store.read(_ready_key(0, unit)) for unit in self.generation.units]
            self._min_units = 0 if None in found else int(found[0] or 0)
        return self._min_units

    def lose(self, unit: int, reason: str) -> Generation:
        """Begin a generation without `unit`."""
        units = tuple(other for other in self.generation.units if other != unit)
        return self._begin(units, reason)

    def admit(self, unit: int, attempt: int) -> Generation | None:
        """Begin a generation with the new process of `unit`, if that is ready to take part; else None.

        attempt: the number of the process among those that were started for lost units.
        """
        if self._store.read(_join_key(unit, attempt)) is None:
            return None
        units = tuple(sorted({*self.generation.units, unit}))
        return self._begin(units, f"rank {unit} is there again")

    def has_joined(self, unit: int, attempt: int) -> bool:
        """That process has the states of the others, and takes part."""
        return self._store.read(_join_key(unit, attempt)) == _JOINED

    def _begin(self, units: tuple[int, ...], reason: str) -> Generation:
        self.generation = Generation(self.generation.number + 1, units, reason)
        text = _KIND.dump_json(self.generation).decode()
        self._store.set(_key(self.generation.number), text)
        return self.generation


@final
class Meeting:
    """Where one unit meets the others of a generation."""

    def __init__(self, store: Any, group: str, unit: int) -> None:
        """store: torch's, a connection that nothing else uses. group: the same name as the launcher's."""
        self._raw = store
        self._store = Store(store, group, unit)
        self._unit = unit

    def announce(self, min_units: int) -> None:
        """This unit can recover from now on. min_units: the fewest that go on."""
        self._store.set(_ready_key(0, self._unit), str(min_units))

    def ask_to_join(self, attempt: int) -> None:
        """This process is ready for the place of a lost one."""
        self._store.set(_join_key(self._unit, attempt), "ready")

    def say_joined(self, attempt: int) -> None:
        """This process has the states of the others."""
        self._store.set(_join_key(self._unit, attempt), _JOINED)

    def next_after(
        self, number: int, timeout_seconds: float, *, is_new: bool = False
    ) -> Generation:
        """Wait for a generation after `number`; the newest one.

        is_new: this unit takes the place of a lost one, so generations without it may come before.

        Raises:
            PeerError: there is none within the timeout, the launcher has ended, or this unit is not in it.
        """
        deadline = time.monotonic() + timeout_seconds
        found: Generation | None = None
        try:
            while found is None:
                try:
                    self._raw.wait([_key(number + 1)], timedelta(seconds=_WAIT_SECONDS))
                except RuntimeError:
                    if time.monotonic() > deadline:
                        raise
                found = self._store.read_as(_KIND, _key(number + 1))
            while (newer := self._store.read_as(_KIND, _key(found.number + 1))) is not None:
                found = newer
        except RuntimeError as error:
            raise PeerError(
                f"a collective failed on rank {self._unit}, and no rank has ended: the launcher has named no "
                f"generation after {number} within {timeout_seconds:.0f} s"
            ) from error
        if self._unit not in found.units:
            if is_new:
                return self.next_after(found.number, timeout_seconds, is_new=True)
            raise PeerError(
                f"rank {self._unit} is not in generation {found.number} of this run, because it did not answer "
                f"({found.reason}): its work is dropped, and it ends"
            )
        return found

    def gather(self, generation: Generation) -> bool:
        """Wait until all units of `generation` are here. False: a newer one has replaced it."""
        self._store.set(_ready_key(generation.number, self._unit), "ready")
        keys = [_ready_key(generation.number, unit) for unit in generation.units]
        while not self._raw.check(keys):
            if self.is_replaced(generation):
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def is_replaced(self, generation: Generation) -> bool:
        """There is a newer one."""
        return bool(self._raw.check([_key(generation.number + 1)]))


def shares_of(
    units: Sequence[int], num_units: int, num_micro_batches: int, unit: int
) -> list[tuple[int, int]]:
    """The micro-batches (unit, number) of a step that `unit` runs: its own, and those of units that are gone.

    units: that are left, of `num_units`. num_micro_batches: of each unit in a step.

    >>> shares_of((0, 2), 3, 2, 0), shares_of((0, 2), 3, 2, 2)
    ([(0, 0), (0, 1), (1, 0)], [(2, 0), (2, 1), (1, 1)])
    """
    numbers = range(num_micro_batches)
    gone = [other for other in range(num_units) if other not in units]
    left_over = [(other, number) for other in gone for number in numbers]
    own = [(unit, number) for number in numbers]
    return own + left_over[units.index(unit) :: len(units)]


__all__ = ["SHARED_MEMORY", "STATES_PREFIX", "Generation", "Lighthouse", "Meeting", "shares_of"]
