"""Decides what happens when ranks fail or hosts are lost: which units go on, and which place is filled where.

    a rank has ended, is stopped    ──> Decider ──> Fill a place, Kill ranks, End the run, Tell the user
    a host is lost, has come            │
                                        └─ names generations (Lighthouse)

It starts nothing and waits for nothing: who has the processes says what happened, and does what is decided. One
process has it, which outlives the ranks: the launcher, or the head of several hosts.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ..utils.quoting import ranks_text
from .generations import GONE_BACK, Lighthouse, there_again

STOPPED_SECONDS = 1.0  # a rank that is stopped for so long is lost
# Of new processes in turn: before they take part, or with one copy after the same step. The next would fail too
MOST_FAILURES = 3
_MOST_SECONDS = 0.2  # that count between two looks: in the rest this process was stopped itself


# -- what is decided ----------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Fill:
    """A new process of `rank` begins on a host. generation: the newest one. attempt: its number, from 1."""

    host: int
    rank: int
    generation: int
    attempt: int


@final
@dataclass(frozen=True)
class Kill:
    """These ranks on a host end at once."""

    host: int
    ranks: tuple[int, ...]


@final
@dataclass(frozen=True)
class End:
    """The run ends for a failure: all ranks are asked to end."""


@final
@dataclass(frozen=True)
class Tell:
    """What the user reads."""

    text: str


Command = Fill | Kill | End | Tell


@final
@dataclass
class Place:
    """A host that may have ranks.

    name: "" for the machine of the launcher alone. ranks: that start there; none on a spare host. num_slots: so
    many it can have. site: where it stands. is_there: the launcher reaches it.
    """

    name: str
    ranks: tuple[int, ...]
    num_slots: int
    site: str = ""
    is_there: bool = True


# -- who decides --------------------------------------------------------------------------------------------


@final
class Decider:
    """The state of all ranks and hosts of one start.

    is_ending: the run ends for a failure. is_done: no process of a rank runs.
    """

    def __init__(self, lighthouse: Lighthouse, places: Sequence[Place], num_spares: int) -> None:
        """num_spares: processes on each host that wait for the place of a lost rank of this host."""
        self.lighthouse, self.places = lighthouse, list(places)
        self.host_of = {rank: host for host, place in enumerate(places) for rank in place.ranks}
        self.is_ending = False
        self._is_over = False  # on request
        self._has_spares = num_spares > 0
        self._commands: list[Command] = []
        # by rank: the number of its process
        self._running = dict.fromkeys(sorted(self.host_of), 0)
        self._codes: dict[int, int] = {}  # how its last process ended
        self._failed: set[int] = set()
        self._lost: set[int] = set()  # ranks without which the run goes on
        self._last_lost: set[int] = set()  # those that were lost last
        self._without_them = lighthouse.generation  # the first one after that
        self._has_missed = False  # all others have ended without noticing that these were lost
        self._without_host: set[int] = (
            set()
        )  # that were lost with their host: their places are filled on another one
        self._stopped: dict[int, float] = {}  # by rank: for how long it has been stopped
        self._told_stopped: set[int] = set()  # units: what the ranks were told
        self._ended_here: set[int] = set()  # ranks that were stopped for too long, and are killed
        self._joining: dict[int, int] = {}  # by rank: its new process, which is no part yet
        self._admitted: set[int] = set()  # units of such ranks that are in the newest generation
        self._attempt = 0  # the number of the last new process
        # by unit: new processes in turn that have failed before they took part
        self._misses: dict[int, int] = {}
        # with one copy, by rank: how those that are lost now ended; the newest process, and after which step
        # how many of them in turn have failed
        self._endings: dict[int, str] = {}
        self._newest: dict[int, int] = {}
        self._failures: dict[int, tuple[int, int]] = {}

    @property
    def is_done(self) -> bool:
        return not self._running

    @property
    def is_waiting(self) -> bool:
        """New processes do not take part yet."""
        return bool(self._joining)

    @property
    def failed(self) -> set[int]:
        """The ranks whose failures are the run's; none of a run that went on to its end."""
        return self._failed if self.is_ending or self._is_over or self._has_missed else set()

    def take_commands(self) -> list[Command]:
        """What was decided since the last call."""
        found, self._commands = self._commands, []
        return found

    # -- what happens -----------------------------------------------------------------------------------

    def ended(self, rank: int, attempt: int, code: int, why: str = "") -> None:
        """A process of `rank` has ended.

        attempt: its number. code: below 0 the signal that ended it. why: its error, in one line, if known.
        """
        if self._running.get(rank) != attempt:
            return  # of a host that was lost
        del self._running[rank]
        # a new process whose script has ended before it took part: the others would wait for it
        is_missed = not code and self._joining.get(rank) == attempt
        is_missed = is_missed and self.lighthouse.joined_step(rank, attempt) < 0
        self._codes[rank] = code or int(is_missed)
        self._stopped.pop(rank, None)
        if self._codes[rank] and not (self.is_ending or self._is_over):
            self._lose(rank, code, why)
        if self._codes[rank] and rank not in self._lost:
            self._failed.add(rank)
        if not self._codes[rank] and self.lighthouse.are_alone:
            self._end_unit(self.lighthouse.unit_of(rank))
        elif not self._codes[rank] and self.lighthouse.units:
            self.lighthouse.say_ended([each for each, code in self._codes.items() if not code])
        if not self._running and self._last_lost and not self.is_ending:
            self._look_for_missed()

    def stopped(self, host: int, ranks: Sequence[int]) -> None:
        """These ranks of a host are stopped now (SIGSTOP), and no others of it."""
        here = {rank for rank in self._stopped if self.host_of[rank] == host}
        for rank in here - set(ranks):
            del self._stopped[rank]
        for rank in ranks:
            if rank in self._running:
                self._stopped.setdefault(rank, 0.0)

    def host_lost(self, host: int, why: str) -> None:
        """A host is not reached any more. Its processes may still run, and count no longer."""
        place = self.places[host]
        place.is_there = False
        ranks = [rank for rank in self._running if self.host_of[rank] == host]
        for rank in ranks:
            del self._running[rank]
            self._stopped.pop(rank, None)
            self._codes[rank] = -signal.SIGKILL
        if self.is_ending or self._is_over:
            return
        ending = f"host {place.name} was lost ({why})"
        if not ranks:
            self._tell(f"{ending}; it had no ranks")
        elif not self.lighthouse.is_ready():
            self._tell(ending)
            self._end()
        elif self.lighthouse.has_one_copy:
            self._replace_host(host, ranks, ending)
        else:
            self._without_host.update(ranks)
            self._lose_units(ranks, ending)

    def host_came(self, host: int) -> None:
        """A host that was lost is reached again, without ranks."""
        self.places[host].is_there = True
        self._tell(f"host {self.places[host].name} is there again")

    def launcher_killed(self) -> None:
        """Before the start, with one copy: new processes take all places of another launcher."""
        has_buddies = len(set(self.host_of.values())) > 1
        self.lighthouse.take_over(len(self.host_of), has_buddies=has_buddies)
        self._running.clear()
        self._codes = dict.fromkeys(self.host_of, -int(signal.SIGKILL))
        self._endings = dict.fromkeys(self.host_of, "the launcher was killed")
        self._lost.update(self.host_of)
        self._fill(sorted(self.host_of))

    def asked_to_end(self) -> None:
        """The user ends the run, or a rank has saved on request: from now on no place is filled."""
        self._is_over = True

    def look(self, seconds: float) -> None:
        """Look at what ranks have said. seconds: since the last call."""
        self.lighthouse.is_ready()
        self._look_for_stopped(min(seconds, _MOST_SECONDS))
        self._admit()
        if not (self.is_ending or self._is_over or self.lighthouse.has_one_copy):
            self._fill_units()

    # -- ranks are lost ---------------------------------------------------------------------------------

    def _lose(self, rank: int, code: int, why: str) -> None:
        """Go on without the unit of `rank`, or end the run."""
        if not self.lighthouse.is_ready():  # before all have built their engines none goes on
            self._end()
            return
        by = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        by += f" ({why})" if why else ""
        if rank in self._ended_here:
            self._ended_here.discard(rank)
            by = f"was stopped for {STOPPED_SECONDS:.0f} s, so the launcher has ended it"
        name = self.places[self.host_of[rank]].name
        ending = f"rank {rank} on {name} {by}" if name else f"rank {rank} {by}"
        if self.lighthouse.has_one_copy:
            self._replace(rank, ending)
        else:
            if rank in self._joining and code >= 0:
                self._note_miss(self.lighthouse.unit_of(rank), ending)
            self._lose_units([rank], ending)

    def _note_miss(self, unit: int, ending: str) -> None:
        self._misses[unit] = self._misses.get(unit, 0) + 1
        if self._misses[unit] == MOST_FAILURES:
            who = f"the last of {MOST_FAILURES} new processes in turn that have failed"
            self._tell(f"{ending}, {who} before they took part: no other one takes its place")

    def _lose_units(self, ranks: Sequence[int], ending: str) -> None:
        """These ranks have ended at once: go on without their units, in one generation."""
        units = sorted({self.lighthouse.unit_of(rank) for rank in ranks})
        dropped, lost = (
            [],
            [],
        )  # units that were admitted and have no states yet; units that have trained
        for unit in units:
            its_ranks = self.lighthouse.units[unit]
            if any(rank in self._joining for rank in its_ranks if rank in ranks):
                for rank in its_ranks:
                    self._joining.pop(rank, None)
                if unit in self._admitted:
                    self._admitted.discard(unit)
                    dropped.append(unit)
            elif any(rank not in self._lost for rank in its_ranks if rank in ranks):
                lost.append(unit)
        if lost and not self._go_on(lost, dropped, ending):
            self._end()
            return
        if dropped and not lost:
            self.lighthouse.lose(dropped, ending)
        for unit in units:  # the others of a unit have no whole state
            self._kill([rank for rank in self.lighthouse.units[unit] if rank in self._running])
        self._fill_units()

    def _go_on(self, lost: Sequence[int], dropped: Sequence[int], ending: str) -> bool:
        """Begin a generation without these units. False: the run cannot go on without them."""
        former = self.lighthouse.generation.units
        left = [unit for unit in former if unit not in lost and unit not in dropped]
        ranks = self.lighthouse.ranks_in(left)
        has_ended = any(rank not in self._running for rank in ranks)
        if has_ended and not self.lighthouse.are_alone:
            return False
        if not set(lost) <= set(former) or len(left) < self.lighthouse.min_units:
            return False
        if not any(self._has_states(unit) for unit in left):
            self._tell(f"{ending}; no other rank has the states yet, so the run ends")
            return False
        self._last_lost = set(self.lighthouse.ranks_in(lost))
        self._lost |= self._last_lost
        generation = self._without_them = self.lighthouse.lose([*dropped, *lost], ending)
        numbers = ", ".join(map(str, ranks))
        self._tell(f"{ending}; ranks {numbers} go on (generation {generation.number})")
        return True

    def _has_states(self, unit: int) -> bool:
        """Its processes have trained, or have copied the states of others."""
        ranks = self.lighthouse.units[unit]
        attempts = {rank: self._joining[rank] for rank in ranks if rank in self._joining}
        return unit not in self._admitted or self.lighthouse.has_joined(unit, attempts)

    def _look_for_missed(self) -> None:
        """If the others have ended without noticing it, nobody has done the rest of the work of lost ranks."""
        if self.lighthouse.are_alone or self.lighthouse.is_met(self._without_them):
            return
        self._miss(self._last_lost)

    def _miss(self, lost: set[int]) -> None:
        """The failures of these ranks are those of the run."""
        self._has_missed = True
        self._failed |= lost
        self._tell(
            "all others had taken their last step, so nobody did what "
            f"{ranks_text(sorted(lost))} had still to do"
        )

    def _end_unit(self, unit: int) -> None:
        """If all ranks of a unit that trains alone have ended well, the others do not wait for it."""
        units = self.lighthouse.generation.units
        is_over = not any(rank in self._running for rank in self.lighthouse.units[unit])
        if is_over and unit in units and len(units) > 1:
            self.lighthouse.lose([unit], "it has ended its script")

    def _replace(self, rank: int, ending: str) -> None:
        """With one copy: start a new process for `rank`, or end the run."""
        self._endings[rank] = ending
        codes = [self._codes[other] for other in self._endings]
        is_error = all(code > 0 and code != GONE_BACK for code in codes)
        # a rank has ended, or all have raised: new processes would raise again
        is_error &= len(self._endings) == len(self.host_of)
        if 0 in self._codes.values() or is_error or self.lighthouse.is_given_up():
            self._lost.discard(rank)  # its failure is reported
            self._end()
            return
        if rank in self._newest:
            step = self.lighthouse.joined_step(rank, self._newest[rank])
            before, count = self._failures.get(rank, (-1, 0))
            count = count + 1 if step in (-1, before) else 1
            self._failures[rank] = (max(step, before), count)
            if count >= MOST_FAILURES:
                self._lost.discard(rank)
                times = f"so did {MOST_FAILURES} of its new processes after the same step"
                self._tell(f"{ending}, and {times}: the run ends")
                self._end()
                return
        self._lost.add(rank)
        self._admitted.clear()
        self._tell(f"{ending}; the other ranks wait for a new process")
        self._fill([rank])

    def _replace_host(self, host: int, ranks: Sequence[int], ending: str) -> None:
        """With one copy: start new processes for the ranks of a lost host on a spare host, or end the run."""
        self._endings.update(dict.fromkeys(ranks, ending))
        listed = ", ".join(map(str, ranks))
        if 0 in self._codes.values() or self.lighthouse.is_given_up():
            self._end()
        elif not self.lighthouse.has_buddies:
            self._tell(
                f"{ending} with the only copy of the states of ranks {listed}, so the run ends; start it again "
                "from its last checkpoint"
            )
            self._end()
        elif not self._move(host):
            self._tell(
                f"{ending}, and no spare host has {len(ranks)} slots for its ranks, so the run ends; mark one "
                "as `spare` in the hostfile"
            )
            self._end()
        else:
            self._lost.update(ranks)
            self._admitted.clear()
            name = self.places[self.host_of[ranks[0]]].name
            self._tell(f"{ending}; the other ranks wait for new processes on {name}")
            self._fill(ranks)

    # -- places are filled ------------------------------------------------------------------------------

    def _fill_units(self) -> None:
        """Let new processes take the places of lost units, where there are spares or a host for them."""
        for unit, ranks in enumerate(self.lighthouse.units):
            is_lost = all(rank in self._lost and rank not in self._running for rank in ranks)
            is_filled = self._has_spares or bool(self._without_host.intersection(ranks))
            if not is_lost or not is_filled or self._misses.get(unit, 0) >= MOST_FAILURES:
                continue
            away = {self.host_of[r] for r in ranks if not self.places[self.host_of[r]].is_there}
            if all(self._move(host) for host in away):
                self._without_host.difference_update(ranks)
                self._fill(self.lighthouse.units[unit])

    def _move(self, host: int) -> bool:
        """Give the places of a lost host to one without ranks. False: there is none with as many slots."""
        ranks = [rank for rank, its_host in self.host_of.items() if its_host == host]
        taken = set(self.host_of.values())
        for number, place in enumerate(self.places):
            is_free = (
                place.is_there and number not in taken and place.site == self.places[host].site
            )
            if is_free and place.num_slots >= len(ranks):
                self.host_of.update(dict.fromkeys(ranks, number))
                return True
        return False

    def _fill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._attempt += 1
            self._joining[rank] = self._newest[rank] = self._running[rank] = self._attempt
            generation = self.lighthouse.generation.number
            self._commands.append(Fill(self.host_of[rank], rank, generation, self._attempt))

    def _admit(self) -> None:
        """Let new processes that have built their engines take part. End those that nobody waits for."""
        lighthouse = self.lighthouse
        # with one copy a generation without a new process for each lost rank would miss them
        if not lighthouse.has_one_copy or self._joining.keys() <= self._admitted:
            lighthouse.repeat_if_asked()
        if lighthouse.has_one_copy:
            self._admit_all()
            return
        for unit in sorted(self._admitted):
            ranks = lighthouse.units[unit]
            if lighthouse.has_joined(unit, self._joining):
                for rank in ranks:
                    del self._joining[rank]
                self._admitted.discard(unit)
                self._misses.pop(unit, None)
                self._lost.difference_update(ranks)
                self._tell(f"{there_again(ranks)} (generation {lighthouse.generation.number})")
        if lighthouse.are_alone or not (self._admitted or lighthouse.is_opening()):
            units = {lighthouse.unit_of(rank) for rank in self._joining} - self._admitted
            self._admitted.update(lighthouse.admit(sorted(units), self._joining))
        if self._running.keys() <= self._joining.keys():
            self._end_newcomers()

    def _admit_all(self) -> None:
        """With one copy: begin a generation when all new processes are ready."""
        if not self._joining:
            return
        if not self._admitted:
            reason = "; ".join(dict.fromkeys(self._endings.values()))
            if self.lighthouse.replace(self._joining, reason) is not None:
                self._admitted.update(self._joining)
        elif all(self.lighthouse.has_joined(rank, self._joining) for rank in self._joining):
            numbers = sorted(self._joining)
            who = "rank" if len(numbers) == 1 else "ranks"
            listed, number = ", ".join(map(str, numbers)), self.lighthouse.generation.number
            self._tell(f"new processes of {who} {listed} take part (generation {number})")
            self._lost.difference_update(numbers)
            self._joining.clear()
            self._admitted.clear()
            self._endings.clear()
        if 0 in self._codes.values() and self._running.keys() <= self._joining.keys():
            self._end_newcomers()

    def _end_newcomers(self) -> None:
        """The others have ended. With one copy they have not gone on without the lost ranks."""
        if self._running and not self.is_ending:
            if self.lighthouse.has_one_copy and not self._is_over:
                self._miss(set(self._joining))
            self._is_over = True
            self._kill(list(self._running))

    # -- what is done -----------------------------------------------------------------------------------

    def _look_for_stopped(self, seconds: float) -> None:
        """Kill ranks that are stopped while others run: a collective waits for them, and they could wake.

        Units that train alone are only told of it.
        """
        have_ended = self.lighthouse.are_alone and 0 in self._codes.values()
        # somebody has stopped the whole run
        if len(self._stopped) == len(self._running) and not have_ended:
            self._stopped = dict.fromkeys(self._stopped, 0.0)
        self._stopped = {rank: waited + seconds for rank, waited in self._stopped.items()}
        lost = [rank for rank, waited in self._stopped.items() if waited > STOPPED_SECONDS]
        if not self.lighthouse.are_alone:
            self._kill(lost)
            self._ended_here.update(lost)
            for rank in lost:
                del self._stopped[rank]
            return
        units = {self.lighthouse.unit_of(rank) for rank in lost}
        left = self._running.keys() - self._joining.keys()
        if have_ended and left and units >= {self.lighthouse.unit_of(rank) for rank in left}:
            self._is_over = True
            self._lost.update(left)
            listed = ", ".join(map(str, sorted(lost)))
            self._tell(f"ranks {listed} are stopped, and all other groups have ended: the run ends")
            self._kill(list(self._running))
            return
        if units != self._told_stopped:
            self._told_stopped = units
            self.lighthouse.say_stopped(sorted(units))

    def _kill(self, ranks: Sequence[int]) -> None:
        for host in dict.fromkeys(self.host_of[rank] for rank in ranks):
            here = tuple(rank for rank in ranks if self.host_of[rank] == host)
            self._commands.append(Kill(host, here))

    def _end(self) -> None:
        self.is_ending = True
        self._commands.append(End())

    def _tell(self, text: str) -> None:
        self._commands.append(Tell(text))


__all__ = [
    "Command",
    "Decider",
    "End",
    "Fill",
    "Kill",
    "Place",
    "Tell",
]
