"""Generations of the group of a run: who decides which units take part, and how they meet.

    launcher   Lighthouse   rank 2 has ended -> generation 1 has units 0, 1
    rank       Meeting      a collective has failed -> waits for generation 1, then for all of its ranks

One generation replaces another one as a whole. Each has a number, which is in the name of its groups and in
the key of every message. So a process that is not in the newest one finds no group to take part in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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

    number: from 0, the start. units: their numbers at the start of the run, ascending.
    reason: what happened, in words.
    """

    number: int
    units: tuple[int, ...]
    reason: str = ""


_KIND = TypeAdapter(Generation)
_STOPPED = f"{PREFIX}/stopped"
# the number of the rank's unit, the fewest units that go on, whether units train alone
_ANNOUNCED = TypeAdapter(tuple[int, int, bool])
_NUMBERS = TypeAdapter(list[int])


def _key(number: int) -> str:
    return f"{PREFIX}/generation/{number}"


def _ready_key(number: int, rank: int) -> str:
    return f"{PREFIX}/ready/{number}/{rank}"


def _join_key(rank: int, attempt: int) -> str:
    return f"{PREFIX}/join/{rank}/{attempt}"


@final
class Lighthouse:
    """Decides who is in a generation. One process of the run has it, which outlives the ranks: the launcher.

    units: the ranks of each unit; empty until all ranks can recover. min_units: the fewest that go on.
    are_alone: no unit waits for another one, which may end or stop.
    """

    def __init__(self, store: Store, num_ranks: int) -> None:
        self.generation = Generation(0, ())
        self.units: list[tuple[int, ...]] = []
        self.min_units = 0
        self.are_alone = False
        self._store, self._num_ranks = store, num_ranks

    def is_ready(self) -> bool:
        """All ranks have built their engines, so they can recover."""
        if not self.units:
            keys = [_ready_key(0, rank) for rank in range(self._num_ranks)]
            found = self._store.read_all_as(_ANNOUNCED, keys)
            if not found:
                return False
            numbers = sorted({unit for unit, *_ in found})
            self.units = [
                tuple(rank for rank, (unit, *_) in enumerate(found) if unit == number)
                for number in numbers
            ]
            _, self.min_units, self.are_alone = found[0]
            self.generation = Generation(0, tuple(numbers))
        return True

    def unit_of(self, rank: int) -> int:
        """The number of the unit of `rank`."""
        return next(number for number, ranks in enumerate(self.units) if rank in ranks)

    def ranks_in(self, units: Sequence[int]) -> list[int]:
        """The ranks of these units, ascending."""
        return sorted(rank for unit in units for rank in self.units[unit])

    def lose(self, unit: int, reason: str) -> Generation:
        """Begin a generation without `unit`."""
        units = tuple(other for other in self.generation.units if other != unit)
        return self._begin(units, reason)

    def say_stopped(self, units: Sequence[int]) -> None:
        """These units have stopped ranks, so they do not answer now."""
        self._store.set(_STOPPED, _NUMBERS.dump_json(sorted(units)).decode())

    def admit(self, unit: int, attempts: Mapping[int, int]) -> Generation | None:
        """Begin a generation with the new processes of `unit`, if all are ready to take part; else None.

        attempts: by rank, the number of its process among those that were started for lost ranks.
        """
        keys = [_join_key(rank, attempts.get(rank, 0)) for rank in self.units[unit]]
        if any(self._store.read(key) is None for key in keys):
            return None
        units = tuple(sorted({*self.generation.units, unit}))
        ranks = self.units[unit]
        who = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {_listed(ranks)} are"
        return self._begin(units, f"{who} there again")

    def has_joined(self, unit: int, attempts: Mapping[int, int]) -> bool:
        """Those processes have the states of the others, and take part."""
        keys = [_join_key(rank, attempts[rank]) for rank in self.units[unit]]
        return all(self._store.read(key) == _JOINED for key in keys)

    def _begin(self, units: tuple[int, ...], reason: str) -> Generation:
        self.generation = Generation(self.generation.number + 1, units, reason)
        text = _KIND.dump_json(self.generation).decode()
        self._store.set(_key(self.generation.number), text)
        return self.generation


@final
class Meeting:
    """Where one rank meets the others of a generation."""

    def __init__(self, store: Any, group: str, rank: int, units: Sequence[tuple[int, ...]]) -> None:
        """
        Args:
            store: torch's, a connection that nothing else uses.
            group: the same name as the launcher's.
            rank: the number of this rank at the start of the run. units: the ranks of each unit then.
        """
        self._raw = store
        self._store = Store(store, group, rank)
        self._rank, self._units = rank, units
        self.unit = next(number for number, ranks in enumerate(units) if rank in ranks)

    def announce(self, min_units: int, *, are_alone: bool = False) -> None:
        """This rank can recover from now on. See `Lighthouse` for the arguments."""
        text = _ANNOUNCED.dump_json((self.unit, min_units, are_alone)).decode()
        self._store.set(_ready_key(0, self._rank), text)

    def ask_to_join(self, attempt: int) -> None:
        """This process is ready for the place of a lost one."""
        self._store.set(_join_key(self._rank, attempt), "ready")

    def say_joined(self, attempt: int) -> None:
        """This process has the states of the others."""
        self._store.set(_join_key(self._rank, attempt), _JOINED)

    def next_after(
        self, number: int, timeout_seconds: float, *, is_new: bool = False
    ) -> Generation:
        """Wait for a generation after `number`; the newest one.

        is_new: this process takes the place of a lost one, so generations without it may come before.

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
                f"a collective failed on rank {self._rank}, and no rank has ended: the launcher has named no "
                f"generation after {number} within {timeout_seconds:.0f} s"
            ) from error
        if self.unit not in found.units:
            if is_new:
                return self.next_after(found.number, timeout_seconds, is_new=True)
            raise PeerError(
                f"rank {self._rank} is not in generation {found.number} of this run, because it did not answer "
                f"({found.reason}): its work is dropped, and it ends"
            )
        return found

    def ranks_in(self, generation: Generation) -> list[int]:
        """The ranks that take part, by their numbers at the start of the run, ascending."""
        return sorted(rank for unit in generation.units for rank in self._units[unit])

    def gather(self, generation: Generation) -> bool:
        """Wait until all ranks of `generation` are here. False: a newer one has replaced it."""
        self._store.set(_ready_key(generation.number, self._rank), "ready")
        keys = [_ready_key(generation.number, rank) for rank in self.ranks_in(generation)]
        while not self._raw.check(keys):
            if self.is_replaced(generation):
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def is_replaced(self, generation: Generation) -> bool:
        """There is a newer one."""
        return bool(self._raw.check([_key(generation.number + 1)]))


@final
class Presence:
    """Which units are there, for those that train alone. No method waits."""

    def __init__(self, store: Store, newest: Generation) -> None:
        """newest: the generation that this process knows."""
        self._store, self._newest = store, newest
        self.reasons: dict[int, str] = {}  # why a unit is not there, by its number

    def newest(self) -> Generation:
        """The newest generation."""
        while (newer := self._store.read_as(_KIND, _key(self._newest.number + 1))) is not None:
            gone = set(self._newest.units) - set(newer.units)
            self.reasons.update(dict.fromkeys(gone, newer.reason))
            self._newest = newer
        return self._newest

    def stopped(self) -> frozenset[int]:
        """The units that do not answer now, because ranks of them are stopped."""
        return frozenset(self._store.read_as(_NUMBERS, _STOPPED) or ())


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


__all__ = ["SHARED_MEMORY", "STATES_PREFIX", "Generation", "Lighthouse", "Meeting", "Presence"]
