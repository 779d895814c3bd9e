"""Generations of the group of a run: who decides which units take part, and how they meet.

    launcher   Lighthouse   rank 2 has ended -> generation 1 has units 0, 1
    rank       Meeting      a collective has failed -> waits for generation 1, then for all of its ranks

One generation replaces another one as a whole. Each has a number, which is in the name of its groups and in
the key of every message. So a process that is not in the newest one finds no group to take part in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from pydantic import TypeAdapter

from ..ops.watch.store import Store
from ..utils.errors import PeerError
from ..utils.quoting import ranks_text

PREFIX = "xds/recovery"
_JOINED, _GIVEN_UP = "joined after step ", f"{PREFIX}/given up"
POLL_SECONDS = 0.002  # between two looks for the others


# exit code (EX_TEMPFAIL): the script cannot go back with the run, and a new process can
GONE_BACK = 75


@final
@dataclass(frozen=True)
class Generation:
    """The units that take part from now on.

    number: from 0, the start. units: their numbers at the start of the run, ascending.
    reason: what happened, in words.
    processes: by rank, the number of its process, where it is not the one of the start (0). An older one may
    still run, on a host that cannot be reached.
    """

    number: int
    units: tuple[int, ...]
    reason: str = ""
    processes: dict[int, int] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Announced:
    """What a rank says when it can recover.

    unit: the number of its unit. min_units: the fewest units that go on.
    are_alone: no unit waits for another one, which may end or stop.
    has_one_copy: each rank has a part of the one copy of the states. So a generation has all ranks: the others
    wait until a new process, with what the lost one has left in memory, takes its place.
    has_buddies: the memory of another host has the same, so a host may be lost.
    """

    unit: int
    min_units: int
    are_alone: bool = False
    has_one_copy: bool = False
    has_buddies: bool = False


_KIND, _ANNOUNCED = TypeAdapter(Generation), TypeAdapter(Announced)
_NUMBERS, _STOPPED = TypeAdapter(list[int]), f"{PREFIX}/stopped"
_ENDED = f"{PREFIX}/ended"  # the ranks that have ended their scripts
_ENDED_SECONDS = 1.0  # a failure of another rank is known before


def _key(number: int) -> str:
    return f"{PREFIX}/generation/{number}"


def _ready_key(number: int, rank: int) -> str:
    return f"{PREFIX}/ready/{number}/{rank}"


def _opened_key(number: int) -> str:
    return f"{PREFIX}/opened/{number}"


def _again_key(number: int) -> str:
    return f"{PREFIX}/again/{number}"


def _join_key(rank: int, attempt: int) -> str:
    return f"{PREFIX}/join/{rank}/{attempt}"


@final
class Lighthouse:
    """Decides who is in a generation. One process of the run has it, which outlives the ranks: the launcher.

    units: the ranks of each unit; empty until all ranks can recover. min_units: the fewest that go on.
    are_alone, has_one_copy, has_buddies: see `Announced`.
    """

    def __init__(self, store: Store, num_ranks: int) -> None:
        self.generation = Generation(0, ())
        self.units: list[tuple[int, ...]] = []
        self.min_units = 0
        self.are_alone = False
        self.has_one_copy = False
        self.has_buddies = False
        self._store, self._num_ranks = store, num_ranks

    def is_ready(self) -> bool:
        """All ranks have built their engines, so they can recover."""
        if not self.units:
            keys = [_ready_key(0, rank) for rank in range(self._num_ranks)]
            found = self._store.read_all_as(_ANNOUNCED, keys)
            if not found:
                return False
            numbers = sorted({each.unit for each in found})
            self.units = [
                tuple(rank for rank, each in enumerate(found) if each.unit == number)
                for number in numbers
            ]
            self.min_units = found[0].min_units
            self.are_alone, self.has_one_copy = found[0].are_alone, found[0].has_one_copy
            self.has_buddies = all(each.has_buddies for each in found)
            self.generation = Generation(0, tuple(numbers))
        return True

    def take_over(self, num_ranks: int, *, has_buddies: bool) -> None:
        """The launcher before this one was killed, and all ranks with it: each has left versions."""
        self.units = [(rank,) for rank in range(num_ranks)]
        self.min_units, self.has_one_copy, self.has_buddies = 1, True, has_buddies
        self.generation = Generation(0, tuple(range(num_ranks)))

    def unit_of(self, rank: int) -> int:
        """The number of the unit of `rank`."""
        return next(number for number, ranks in enumerate(self.units) if rank in ranks)

    def ranks_in(self, units: Sequence[int]) -> list[int]:
        """The ranks of these units, ascending."""
        return sorted(rank for unit in units for rank in self.units[unit])

    def lose(self, units: Sequence[int], reason: str) -> Generation:
        """Begin a generation without `units`."""
        left = tuple(other for other in self.generation.units if other not in units)
        return self._begin(left, reason)

    def say_stopped(self, units: Sequence[int]) -> None:
        """These units have stopped ranks, so they do not answer now."""
        self._store.set(_STOPPED, _NUMBERS.dump_json(sorted(units)).decode())

    def say_ended(self, ranks: Sequence[int]) -> None:
        """These ranks have ended their scripts well. A rank whose collective fails waits in vain."""
        self._store.set(_ENDED, _NUMBERS.dump_json(sorted(ranks)).decode())

    def is_met(self, since: Generation) -> bool:
        """A rank of this generation has noticed it, or a later one."""
        numbers = range(since.number, self.generation.number + 1)
        keys = [
            _ready_key(number, rank) for number in numbers for rank in self.ranks_in(since.units)
        ]
        return any(self._store.read(key) is not None for key in keys)

    def is_opening(self) -> bool:
        """Ranks open the groups of the newest generation, which another one would end."""
        number = self.generation.number
        if not number or self._store.read(_opened_key(number)) is not None:
            return False
        keys = (_ready_key(number, rank) for rank in self.ranks_in(self.generation.units))
        return any(self._store.read(key) is not None for key in keys)

    def admit(self, units: Sequence[int], attempts: Mapping[int, int]) -> list[int]:
        """Begin a generation with the new processes of those `units` that are ready. Returns these units.

        attempts: by rank, the number of its process among those that were started for lost ranks.
        """
        by_unit = {
            unit: {rank: attempts.get(rank, 0) for rank in self.units[unit]} for unit in units
        }
        ready = [unit for unit in units if self._are_ready(by_unit[unit])]
        if ready:
            there = tuple(sorted({*self.generation.units, *ready}))
            processes = {rank: number for unit in ready for rank, number in by_unit[unit].items()}
            self._begin(there, there_again(self.ranks_in(ready)), processes)
        return ready

    def repeat_if_asked(self) -> None:
        """Begin the generation again, if one of its ranks could not meet the others, though none has ended."""
        if self._store.read(_again_key(self.generation.number)) is not None:
            self._begin(self.generation.units, self.generation.reason)

    def is_given_up(self) -> bool:
        """A rank has said that the run cannot go on."""
        return self._store.read(_GIVEN_UP) is not None

    def replace(self, attempts: Mapping[int, int], reason: str) -> Generation | None:
        """With one copy: begin a generation of all ranks, if all new processes are ready; else None.

        attempts: as for `admit`, of all ranks that were lost.
        """
        if not self._are_ready(attempts):
            return None
        return self._begin(self.generation.units, reason, attempts)

    def _are_ready(self, attempts: Mapping[int, int]) -> bool:
        keys = [_join_key(rank, attempt) for rank, attempt in attempts.items()]
        return all(self._store.read(key) is not None for key in keys)

    def has_joined(self, unit: int, attempts: Mapping[int, int]) -> bool:
        """Those processes have the states of the others, and take part."""
        return all(self.joined_step(rank, attempts[rank]) >= 0 for rank in self.units[unit])

    def joined_step(self, rank: int, attempt: int) -> int:
        """The step after which this new process has taken part; -1: it has not."""
        said = self._store.read(_join_key(rank, attempt)) or ""
        return int(said.removeprefix(_JOINED)) if said.startswith(_JOINED) else -1

    def _begin(
        self, units: tuple[int, ...], reason: str, new: Mapping[int, int] | None = None
    ) -> Generation:
        """new: the processes that take part from now on, by rank."""
        former = self.generation
        processes = {**former.processes, **(new or {})}
        self.generation = Generation(former.number + 1, units, reason, processes)
        text = _KIND.dump_json(self.generation).decode()
        self._store.set(_key(self.generation.number), text)
        return self.generation


@final
class Meeting:
    """Where one rank meets the others of a generation."""

    def __init__(
        self, store: Any, group: str, rank: int, units: Sequence[tuple[int, ...]], process: int = 0
    ) -> None:
        """
        Args:
            store: torch's, a connection that nothing else uses.
            group: the same name as the launcher's.
            rank: the number of this rank at the start of the run. units: the ranks of each unit then.
            process: the number of this process among those of its rank; 0: of the start.
        """
        self._raw = store
        self._store = Store(store, group, rank)
        self._rank, self._units, self._process = rank, units, process
        self.unit = next(number for number, ranks in enumerate(units) if rank in ranks)

    def announce(
        self,
        min_units: int,
        *,
        are_alone: bool = False,
        has_one_copy: bool = False,
        has_buddies: bool = False,
    ) -> None:
        """This rank can recover from now on. The arguments: see `Announced`."""
        said = Announced(self.unit, min_units, are_alone, has_one_copy, has_buddies)
        text = _ANNOUNCED.dump_json(said).decode()
        self._store.set(_ready_key(0, self._rank), text)

    def ask_to_join(self, attempt: int) -> None:
        """This process is ready for the place of a lost one."""
        self._store.set(_join_key(self._rank, attempt), "ready")

    def say_joined(self, attempt: int, step: int = 0) -> None:
        """This process has the states of its place, and takes part after so many steps."""
        self._store.set(_join_key(self._rank, attempt), f"{_JOINED}{step}")

    def next_after(
        self, number: int, timeout_seconds: float, *, is_new: bool = False
    ) -> Generation:
        """Wait for a generation after `number`; the newest one.

        is_new: this process takes the place of a lost one, so generations without it may come before.

        Raises:
            PeerError: there is none within the timeout, the launcher has ended, or this unit is not in it.
        """
        try:
            found = self._wait_after(number, timeout_seconds, heeds_ends=not is_new)
            while (newer := self._store.read_as(_KIND, _key(found.number + 1))) is not None:
                found = newer
        except RuntimeError as error:
            raise PeerError(
                f"a collective failed on rank {self._rank}: {error}; the launcher has named no generation "
                f"after {number}"
            ) from error
        newest = found.processes.get(self._rank, 0)
        if is_new and newest <= self._process and not self._has(found):
            return self.next_after(found.number, timeout_seconds, is_new=True)
        if newest > self._process:
            raise PeerError(
                f"another process is rank {self._rank} in generation {found.number} of this run, because this "
                "one did not answer: its work is dropped, and it ends"
            )
        if not self._has(found):
            raise PeerError(
                f"rank {self._rank} is not in generation {found.number} of this run, because it did not answer "
                f"({found.reason}): its work is dropped, and it ends"
            )
        return found

    def _wait_after(self, number: int, timeout_seconds: float, *, heeds_ends: bool) -> Generation:
        """The generation after `number`. heeds_ends: ranks that have ended well are why there is none.

        Raises RuntimeError: there is none.
        """
        begun_seconds = time.monotonic()
        while True:
            if self._raw.check([_key(number + 1)]):
                found = self._store.read_as(_KIND, _key(number + 1))
                if found is not None:
                    return found
            seconds = time.monotonic() - begun_seconds
            if heeds_ends and seconds > _ENDED_SECONDS:
                ended = self._store.read_as(_NUMBERS, _ENDED)
                if ended:
                    raise RuntimeError(
                        f"{ranks_text(ended)} ended the script with code 0, and this rank waits for the next "
                        "step; let all ranks take the same steps"
                    )
            if seconds > timeout_seconds:
                raise RuntimeError(f"no rank has ended within {timeout_seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def _has(self, generation: Generation) -> bool:
        """This process takes part in it."""
        process = generation.processes.get(self._rank, 0)
        return self.unit in generation.units and process == self._process

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
            time.sleep(POLL_SECONDS)
        return True

    def say_opened(self, generation: Generation) -> None:
        """All ranks have opened their groups. For one of them."""
        self._store.set(_opened_key(generation.number), "opened")

    def ask_again(self, generation: Generation) -> None:
        """This rank has not met the others. If none has ended, the launcher names another generation."""
        self._store.set(_again_key(generation.number), "again")

    def give_up(self) -> None:
        """The run cannot go on: this rank ends, and no new process takes its place."""
        self._store.set(_GIVEN_UP, "ends")

    def is_replaced(self, generation: Generation) -> bool:
        """There is a newer one."""
        return bool(self._raw.check([_key(generation.number + 1)]))

    def has_lost(self, generation: Generation) -> bool:
        """A newer one lacks a process of this one."""
        ranks = self.ranks_in(generation)
        newer: Generation | None = generation
        while newer is not None:
            is_gone = not set(generation.units) <= set(newer.units)
            now, before = newer.processes, generation.processes
            if is_gone or any(now.get(rank, 0) != before.get(rank, 0) for rank in ranks):
                return True
            newer = self._store.read_as(_KIND, _key(newer.number + 1))
        return False


@final
class Presence:
    """Which units are there, for those that train alone. No method waits."""

    def __init__(
        self, store: Store, newest: Generation, unit: int, rank: int, process: int = 0
    ) -> None:
        """newest: the generation that this process knows. unit, rank, process: its own, as for `Meeting`."""
        self._store, self._newest = store, newest
        self._unit, self._rank, self._process = unit, rank, process
        self._takes_part = not process  # a new process does so later
        self.reasons: dict[int, str] = {}  # why a unit is not there, by its number

    def newest(self) -> Generation:
        """The newest generation. Raises PeerError: this process is in it no more, because it did not answer."""
        while (newer := self._store.read_as(_KIND, _key(self._newest.number + 1))) is not None:
            gone = set(self._newest.units) - set(newer.units)
            self.reasons.update(dict.fromkeys(gone, newer.reason))
            newest = newer.processes.get(self._rank, 0)
            is_in = self._unit in newer.units and newest == self._process
            if newest > self._process or self._takes_part and not is_in:
                raise PeerError(
                    f"rank {self._rank} is not in generation {newer.number} of this run, because it did not "
                    f"answer ({newer.reason}): its work is dropped, and it ends"
                )
            self._takes_part |= is_in
            self._newest = newer
        return self._newest

    def stopped(self) -> frozenset[int]:
        """The units that do not answer now, because ranks of them are stopped."""
        return frozenset(self._store.read_as(_NUMBERS, _STOPPED) or ())


def there_again(ranks: Sequence[int]) -> str:
    """That new processes of these ranks take part.

    >>> there_again([2]), there_again([2, 3])
    ('rank 2 is there again', 'ranks 2, 3 are there again')
    """
    who = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
    return f"{who} there again"


__all__ = [
    "GONE_BACK",
    "POLL_SECONDS",
    "Announced",
    "Generation",
    "Lighthouse",
    "Meeting",
    "Presence",
    "there_again",
]
