"""Meetings of groups that come and go: who takes part, and whether it counts. In the launcher's store.

    group A   here ─┐                               mean of A, B   done ─┐
    group B   here ─┴─> groups of (3, 0): A, B      mean of A, B   done ─┴─> (3, 0) counts
    group C   late: finds (3, 0) without it, trains on, and takes part in 4

A meeting has a number, and is tried until it counts. What is decided about a try is one message, and the first
one stays: which groups take part, and how it has ended. So all processes read the same, whoever dies meanwhile.
The first rank of a group speaks for it, and tells the others of the group.

Source: the quorum and the wait for late ones are those of Decoupled DiLoCo, 2026, https://arxiv.org/abs/2604.21428.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final

from pydantic import TypeAdapter

from ..ops.watch.store import Store
from ..utils.errors import PeerError

_POLL_SECONDS = 0.01
_TEXT = TypeAdapter(str)
_NUMBER = TypeAdapter(int)
_YES = "1"
COUNTS, DROPPED = "counts", "dropped"


class Living(Protocol):
    """A generation of groups. See recovery/generations.py."""

    @property
    def number(self) -> int: ...
    @property
    def units(self) -> tuple[int, ...]: ...
    @property
    def reason(self) -> str: ...


class Present(Protocol):
    """Which groups are there."""

    def newest(self) -> Living: ...
    def stopped(self) -> frozenset[int]: ...


@final
@dataclass(frozen=True)
class Try:
    """A try of a meeting.

    number: of the meeting, from 1. attempt: from 0. groups: that take part, ascending; none: nobody does.
    generation: of the groups, when this was decided.
    """

    number: int
    attempt: int = 0
    groups: tuple[int, ...] = ()
    generation: int = 0


@final
@dataclass(frozen=True)
class Patience:
    """How long groups wait for others. For quorum and window see `Outer`; timeout: of any wait."""

    quorum: int | None
    window_seconds: float
    timeout_seconds: float


_TRY = TypeAdapter(Try)


@final
class Rounds:
    """The meetings, as one rank sees them. Every method may raise RuntimeError: the store is not reachable."""

    def __init__(
        self,
        store: Store,
        present: Present,
        patience: Patience,
        place: tuple[int, int, int],
        first: int,
    ) -> None:
        """
        Args:
            store: a connection that does not wait.
            place: the number of this group, of this rank in it, and the ranks of a group.
            first: the generation in which this process began. Before that the group had other processes.
        """
        self._store, self._present, self._patience = store, present, patience
        self.group, self._rank, self._num_ranks = place
        self._first = first
        self._num_told = 0
        self._took_part: dict[int, frozenset[int]] = {}  # by number of the meeting that counts

    # -- who takes part ---------------------------------------------------------------------------------

    def seek(self, number: int, last: int | None = None, *, is_new: bool = False) -> Try:
        """Come to the next meeting that has not been held, `number` or a later one. For all ranks of the group.

        Returns the try that this group takes part in. One without groups: it takes part in none, because the
        meeting runs without it, or was held and nobody waits; its number is the one to come to later.

        last: the last meeting that this group can come to; None: there is none.
        is_new: this group has no outer parameters yet, so it waits for others in any case.
        Raises PeerError: the quorum was not there in time.
        """
        if self._rank:
            return self._told()
        found = self._seek(number, last, is_new)
        if self._num_ranks > 1:
            self._store.set(self._told_key(self._num_told), _TRY.dump_json(found).decode())
            self._store.delete(self._told_key(self._num_told - 2))  # all have read it
            self._num_told += 1
        return found

    def _told_key(self, number: int) -> str:
        return f"told/{self.group}/{self._first}/{number}"

    def _told(self) -> Try:
        key, self._num_told = self._told_key(self._num_told), self._num_told + 1
        while (found := self._store.read_as(_TRY, key)) is None:
            time.sleep(_POLL_SECONDS)
        return found

    def _seek(self, number: int, last: int | None, is_new: bool) -> Try:
        trial, first = Try(number), number
        while True:
            trial = self._open_from(trial)
            if last is not None and trial.number > last:
                return Try(trial.number)
            if trial.groups:
                if self.group in trial.groups and trial.generation >= self._first:
                    return trial
                if not set(trial.groups) <= set(self._present.newest().units):
                    self._end(trial, DROPPED)
                elif is_new:
                    time.sleep(_POLL_SECONDS)
                else:
                    return Try(trial.number)  # it runs without this group
                continue
            is_missed = trial.number > first and not is_new
            if is_missed and not self._here(trial, self._present.newest().units):
                return Try(trial.number)
            if self._gives_up(trial, is_new):
                return Try(trial.number)

    def _open_from(self, trial: Try) -> Try:
        """The first try, `trial` or a later one, that has not ended; with its groups if they are decided."""
        number, attempt = trial.number, trial.attempt
        while True:
            outcome = self._outcome(number, attempt)
            found = self._decided(number, attempt)
            if outcome == COUNTS:
                number, attempt = number + 1, 0
            elif outcome == DROPPED or found is not None and not found.groups:
                attempt += 1
            else:
                return found or Try(number, attempt)

    def _gives_up(self, trial: Try, is_new: bool) -> bool:
        """Wait in a try until its groups are decided, and decide them. True: nobody takes part in it."""
        self._store.set(_here_key(trial, self.group), _YES)
        begun_seconds, patience = time.monotonic(), self._patience
        while self._decided(trial.number, trial.attempt) is None:
            living = self._present.newest()
            answering = set(living.units) - self._present.stopped() | {self.group}
            here = self._here(trial, answering)
            needed = len(answering)
            waited_seconds = time.monotonic() - begun_seconds
            is_late = waited_seconds > 2 * patience.window_seconds
            if is_late and patience.quorum is not None:
                needed = min(patience.quorum, needed)
            if len(here) >= needed:
                holders = self._holders(trial.number, living.units)
                if not holders or holders & here:
                    if not set(living.units) <= here:
                        self._call(trial.number)
                    self._decide(
                        replace(trial, groups=tuple(sorted(here)), generation=living.number)
                    )
                elif is_late and not is_new and self._decide(trial):
                    return True  # those with the outer parameters are away
            if not is_new and waited_seconds > patience.window_seconds:
                self._call(trial.number)
            if not is_new and waited_seconds > patience.timeout_seconds:
                self._decide(trial)
                missing = ", ".join(map(str, sorted(answering - here)))
                raise PeerError(
                    f"meeting {trial.number}: groups {missing} have not come within "
                    f"{patience.timeout_seconds:.0f} s (XDS_TIMEOUT_SECONDS), and it needs {needed} groups: "
                    "lower outer.quorum, or look at them"
                )
            time.sleep(_POLL_SECONDS)
        return False

    def _decided(self, number: int, attempt: int) -> Try | None:
        return self._store.read_as(_TRY, _key("groups", number, attempt))

    def _decide(self, trial: Try) -> bool:
        """Decide who takes part, if nobody has. Returns whether it is as in `trial`."""
        key = _key("groups", trial.number, trial.attempt)
        self._store.set_first(key, _TRY.dump_json(trial).decode())
        return self._store.read_as(_TRY, key) == trial

    def _here(self, trial: Try, groups: Iterable[int]) -> set[int]:
        """Those of `groups` that wait in this try."""
        return {group for group in groups if self._store.has_all([_here_key(trial, group)])}

    def _holders(self, number: int, living: Iterable[int]) -> frozenset[int]:
        """The groups that have the newest outer parameters; none: all have the same."""
        for earlier in range(number - 1, -1, -1):
            found = self._in_meeting(earlier) & frozenset(living)
            found = frozenset(group for group in found if self._since(group) <= earlier)
            if found:
                return found
        return frozenset()

    def _in_meeting(self, number: int) -> frozenset[int]:
        if not number:
            return frozenset(range(1 << 10))  # all: the start
        if number not in self._took_part:
            attempt, found = 0, self._decided(number, 0)
            while self._outcome(number, attempt) != COUNTS:
                attempt += 1
                found = self._decided(number, attempt)
            self._took_part[number] = frozenset(found.groups if found is not None else ())
        return self._took_part[number]

    # -- calls ------------------------------------------------------------------------------------------

    def _call(self, number: int) -> None:
        self._store.set_first(f"call/{number}", _YES)

    def is_called(self, number: int) -> bool:
        """Groups wait for others in this meeting, or have held it without some."""
        return self._store.has_all([f"call/{number}"])

    # -- a new group ------------------------------------------------------------------------------------

    def begin_anew(self) -> int:
        """This group has no outer parameters until it has taken part. For its first rank. The next meeting."""
        number = self._open_from(Try(1)).number
        self._store.set(f"since/{self.group}", str(number + 1))
        return number

    def _since(self, group: int) -> int:
        return self._store.read_as(_NUMBER, f"since/{group}") or 0

    # -- whether it counts ------------------------------------------------------------------------------

    def conclude(self, trial: Try, *, is_done: bool) -> bool:
        """Whether a try counts: all ranks of all its groups say that they are done. For all of them."""
        if is_done:
            self._store.set(_done_key(trial, self.group, self._rank), _YES)
        else:
            self._end(trial, DROPPED)
        keys = [
            _done_key(trial, group, rank)
            for group in trial.groups
            for rank in range(self._num_ranks)
        ]
        begun_seconds = time.monotonic()
        while not (outcome := self._outcome(trial.number, trial.attempt)):
            is_late = time.monotonic() - begun_seconds > self._patience.timeout_seconds
            if self._store.has_all(keys):
                self._end(trial, COUNTS)
            elif is_late or self.lacks(trial):
                self._end(trial, DROPPED)
            else:
                time.sleep(_POLL_SECONDS)
        if (self.group, self._rank) == (trial.groups[0], 0):  # nobody asks for these any more
            for key in (*keys, *(_here_key(trial, group) for group in trial.groups)):
                self._store.delete(key)
        return outcome == COUNTS

    def lacks(self, trial: Try) -> bool:
        """A group of the try has ended or is stopped, or another one has given it up."""
        living = set(self._present.newest().units) - self._present.stopped()
        return not living >= set(trial.groups) or bool(self._outcome(trial.number, trial.attempt))

    def _end(self, trial: Try, outcome: str) -> None:
        self._store.set_first(_key("outcome", trial.number, trial.attempt), f'"{outcome}"')

    def _outcome(self, number: int, attempt: int) -> str:
        return self._store.read_as(_TEXT, _key("outcome", number, attempt)) or ""


def _key(what: str, number: int, attempt: int) -> str:
    return f"{what}/{number}/{attempt}"


def _here_key(trial: Try, group: int) -> str:
    return f"{_key('here', trial.number, trial.attempt)}/{group}"


def _done_key(trial: Try, group: int, rank: int) -> str:
    return f"{_key('done', trial.number, trial.attempt)}/{group}/{rank}"


def changes(before: Sequence[int], now: Sequence[int]) -> tuple[list[int], list[int]]:
    """The groups that are not there any more, and those that are there again.

    >>> changes((0, 1), (0, 2))
    ([1], [2])
    """
    return sorted(set(before) - set(now)), sorted(set(now) - set(before))


__all__ = ["Living", "Patience", "Present", "Rounds", "Try", "changes"]
