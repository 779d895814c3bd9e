"""Runs the ranks of one machine so that others go on when one fails: `xds --recover`.

    one machine     Units        starts ranks, sees how they end, asks the decider, and does what it says
    several         UnitsOfHead  the same on each host, and the head has the decider
                        │ Ended, Stopped ──> head         head ──> Fill, Kill, Finish │

torch's agent ends all its ranks at the first failure. So this module starts the ranks itself, in the same
environment. The store is in the process of the decider, and outlives every rank.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from glob import glob
from typing import TYPE_CHECKING, Any, final

from ...utils.errors import XdsError
from ...utils.messages import write_stderr
from ...utils.quoting import printable
from ..job import Order
from .failure import SAVED_AND_LEFT
from .guard import stat
from .network import split_endpoint
from .run_folder import RunFolder
from .stop import Stop

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from ...recovery.decider import Decider, Fill
    from ...recovery.spares import Process

LOOK_SECONDS = 0.05
LOOK_FOR_NEW_SECONDS = 0.005  # while a new process builds its engine
_FORK_SECONDS = 2.0  # that a place waits for a spare, beside which a new process takes longer


# -- what happens on a host, and what it is told ------------------------------------------------------------


@final
@dataclass(frozen=True)
class Ended:
    """A process of a rank has ended. attempt: its number. code: below 0 the signal that ended it.

    why: the error that it has recorded, in one line, if any.
    """

    rank: int
    attempt: int
    code: int
    why: str = ""


@final
@dataclass(frozen=True)
class Stopped:
    """These ranks of the host are stopped now (SIGSTOP), and no others."""

    ranks: tuple[int, ...]


@final
@dataclass(frozen=True)
class Finish:
    """All ranks of the run have ended: spares end, and so does this start."""


def tell_decider(decider: Decider, host: int, event: Ended | Stopped) -> None:
    """What happened on a host."""
    if isinstance(event, Stopped):
        decider.stopped(host, event.ranks)
        return
    if event.code == SAVED_AND_LEFT:  # the others end as well
        decider.asked_to_end()
    decider.ended(event.rank, event.attempt, event.code, event.why)


@final
class HeadLine:
    """What passes between the ranks of a host and its connection to the head.

    attempts: by rank, the number of the last new process that has run here. Read at the end.
    """

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Ended | Stopped | None] = queue.SimpleQueue()
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()  # Fill, Kill, Finish
        self.attempts: dict[int, int] = {}


# -- the processes of one host ------------------------------------------------------------------------------


@final
class Runner:
    """The processes of the ranks of one host, and those that wait for a place. For one thread.

    failures: by rank, how its last process ended, if badly.
    num_started: processes of ranks until now. lost_pids: of those that ended badly.
    """

    def __init__(
        self,
        order: Order,
        folder: RunFolder,
        extra: dict[str, str],
        num_ranks: int,
        inbox: queue.SimpleQueue[Any],
    ) -> None:
        """inbox: what others put there is returned by `look`, which waits for it."""
        from ...recovery.spares import Spares

        self.failures: dict[int, ProcessFailure] = {}
        self.num_started = 0
        self.lost_pids: set[int] = set()
        self.ranks: dict[int, int] = {}  # by local rank
        self._order, self._folder, self._extra = order, folder, extra
        self._counts = order.counts or (num_ranks,)
        self._inbox = inbox
        job, number = order.job, order.rendezvous.node_rank
        self._own = number if order.counts else 0  # None: this host is spare
        self._spares = Spares(num_ranks if self._own is None else job.num_spares, folder.path)
        self._has_told = False  # why there are no more spares
        self._argv: list[str] = []
        self._environments: dict[int, dict[str, Any]] = {}  # of ranks that may run here
        self._errors: dict[int, str] = {}  # by rank: the path of its failure record
        self._running: dict[int, tuple[int, Process]] = {}  # with its number
        self._killed: set[int] = set()  # numbers of new processes that the decider has ended
        # by rank: places that wait for a spare, and until when
        self._unfilled: dict[int, tuple[Fill, float]] = {}
        self._stopped: tuple[int, ...] = ()  # as last told

    @property
    def is_running(self) -> bool:
        """A rank runs, or begins."""
        return bool(self._running or self._unfilled)

    def begin(self, *, starts: bool = True) -> None:
        """Start the ranks of this host, if it `starts` them, and its spares."""
        from .elastic import WORKER

        job = self._order.job
        self._argv = [sys.executable, "-u", WORKER, job.kind, job.target, *job.args]
        is_first = None if starts else False  # logs go on
        for rank in [] if self._own is None else self._take_place(self._own, is_first=is_first):
            if not starts:
                continue
            process = subprocess.Popen(
                self._argv, env=self._environment(rank), start_new_session=True
            )
            self._run_rank(rank, 0, process)
        self._spares.begin(self._argv, self._spare_environment())

    def look(self, seconds: float) -> list[Any]:
        """Wait until something happens, for at most so long. Ended, Stopped, and what the inbox got."""
        found: list[Any] = []
        if self._unfilled:
            seconds = min(seconds, LOOK_FOR_NEW_SECONDS)
        with contextlib.suppress(queue.Empty):
            found.append(self._inbox.get(timeout=seconds))
            while True:
                found.append(self._inbox.get_nowait())
        for number, event in enumerate(found):
            if isinstance(event, Ended) and event.rank in self._running:
                process = self._running.pop(event.rank)[1]
                self._spares.note_end(process, str(self._folder.path / f"rank{event.rank}"))
                found[number] = self._note(event, process.pid)
        self._spares.look()
        self._fill_places()
        if self._spares.given_up and not self._has_told:
            self._has_told = True
            write_stderr(f"xds: {self._spares.given_up}\n")
        running = self._running.items()
        stopped = tuple(rank for rank, (_, process) in running if _is_stopped(process.pid))
        if stopped != self._stopped:
            self._stopped = stopped
            found.append(Stopped(stopped))
        return found

    def kill(self, ranks: Iterable[int]) -> None:
        """End these ranks at once."""
        for rank in ranks:
            if rank in self._running:
                attempt, process = self._running[rank]
                if attempt:  # all ranks of the start have 0
                    self._killed.add(attempt)
                process.kill()
        self._leave_unfilled(ranks)

    def ask_to_end(self) -> None:
        """Ask all ranks to end."""
        for _, process in self._running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)
        self._leave_unfilled(list(self._unfilled))

    def fill(self, place: Fill) -> None:
        """Let a spare be this rank as soon as there is one, or a new process where none comes."""
        if place.rank not in self.ranks.values():
            self._take_place(self._place_of(place.rank), is_first=False)
        self._unfilled[place.rank] = place, time.monotonic() + _FORK_SECONDS
        self._fill_places()

    def _fill_places(self) -> None:
        for rank, (place, deadline) in list(self._unfilled.items()):
            joins = f"{place.generation} {place.attempt}"
            changes = {**self._environments[rank], "XDS_JOINS": joins}
            process: Process | None = self._spares.take(changes)
            if process is None:
                comes = self._spares.expect(len(self._unfilled))
                if comes and time.monotonic() < deadline:
                    continue
                environment = {**os.environ, **changes}
                process = subprocess.Popen(self._argv, env=environment, start_new_session=True)
            del self._unfilled[rank]
            self._run_rank(rank, place.attempt, process)
            self._spares.number = self._order.job.num_spares  # a spare host had one for each slot

    def _leave_unfilled(self, ranks: Iterable[int]) -> None:
        """No process takes these places."""
        for rank in self._unfilled.keys() & set(ranks):
            place, _ = self._unfilled.pop(rank)
            self._inbox.put(Ended(rank, place.attempt, -signal.SIGKILL))

    def end(self) -> None:
        """End the spares."""
        self._spares.end()

    # -- environments -------------------------------------------------------------------------------

    def _place_of(self, rank: int) -> int:
        """The number of the host at which `rank` is counted, wherever it runs."""
        return next(
            place for place in range(len(self._counts)) if rank < sum(self._counts[: place + 1])
        )

    def _variables(self, rank: int) -> dict[str, Any]:
        """What torch's agent would set."""
        order, place = self._order, self._place_of(rank)
        local, world = rank - sum(self._counts[:place]), sum(self._counts)
        host, port = split_endpoint(order.rendezvous.endpoint)
        beside = self._counts[place]
        return {
            **dict.fromkeys(("RANK", "ROLE_RANK"), str(rank)),
            **{"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(beside)},
            **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world)),
            **{"GROUP_RANK": str(place), "GROUP_WORLD_SIZE": str(len(self._counts))},
            **{"ROLE_NAME": "default", "MASTER_ADDR": host, "MASTER_PORT": str(port)},
            "TORCHELASTIC_RESTART_COUNT": str(order.generation),
            "TORCHELASTIC_MAX_RESTARTS": str(order.max_restarts),
            "TORCHELASTIC_RUN_ID": "recover",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "XDS_LIGHTHOUSE": order.rendezvous.endpoint,
        }

    def _take_place(self, place: int, *, is_first: bool | None) -> Sequence[int]:
        """Choose the environment and the files of the ranks that are counted there."""
        from .elastic import RankFiles

        first = sum(self._counts[:place])
        ranks = range(first, first + self._counts[place])
        by_local = {rank - first: self._variables(rank) for rank in ranks}
        files = RankFiles(
            *(self._folder, self._order, len(ranks), self.ranks, self._extra), is_first=is_first
        )
        errors = files.reify(by_local).error_files
        self._environments = {rank: by_local[rank - first] for rank in ranks}
        self._errors = {rank: errors[rank - first] for rank in ranks}
        return ranks

    def _environment(self, rank: int) -> dict[str, str]:
        return {**os.environ, **self._environments[rank]}

    # -- processes ----------------------------------------------------------------------------------

    def _run_rank(self, rank: int, attempt: int, process: Process) -> None:
        if attempt:
            with contextlib.suppress(OSError):  # what the process before it has recorded
                os.unlink(self._errors[rank])
        self._running[rank] = attempt, process
        self.num_started += 1
        waits = threading.Thread(target=self._wait, args=(rank, attempt, process), daemon=True)
        waits.start()

    def _wait(self, rank: int, attempt: int, process: Process) -> None:
        # WNOWAIT: another thread waits for it as well, and reads how it ended
        with contextlib.suppress(ChildProcessError):  # a signal to it has found that it had ended
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self._inbox.put(Ended(rank, attempt, process.wait()))

    def _note(self, event: Ended, pid: int) -> Ended:
        """Keep how this process has ended. Returns the event with its error."""
        from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

        if event.attempt in self._killed and event.rank in self.failures:
            return event  # the process before it tells more
        self.failures.pop(event.rank, None)
        if not event.code:
            return event
        self.lost_pids.add(pid)
        error_file = self._errors[event.rank]
        failure = ProcessFailure(event.rank, pid, event.code, error_file)
        self.failures[event.rank] = failure
        if event.code < 0 or "xds" not in failure.error_file_data:
            return event
        return replace(event, why=printable(failure.error_file_data["message"]["message"]))

    def _spare_environment(self) -> dict[str, str]:
        """Of the last rank: a spare runs the script as that one, until it has a place."""
        from .elastic import common_environment

        last = max(self._environments, default=None)
        if last is not None:
            return self._environment(last)
        shared = common_environment(self._order, self._spares.number)
        return {**os.environ, **self._variables(sum(self._counts) - 1), **shared}


def _is_stopped(pid: int) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] == "T"


# -- threads that run a host --------------------------------------------------------------------------------


class HostUnits(threading.Thread, ABC):
    """A thread that runs the ranks of a host, and stores their result. See `supervise`."""

    def __init__(self, order: Order, folder: RunFolder, stop: Stop, extra: dict[str, str]) -> None:
        super().__init__(name="xds-units", daemon=True)
        self.num_ranks = 0  # until it is known
        self.failures: dict[int, ProcessFailure] = {}  # by rank; of a run that has ended for them
        self.error: XdsError | None = None
        self.fault = ""
        self.store_reference: object = None
        self.is_ending = False  # the run ends for a failure
        self.folder, self.order = folder, order
        self._stop_asked, self._extra = stop, extra
        self._runner: Runner | None = None

    def ranks(self) -> dict[int, int]:
        """Rank by local rank; empty until they start."""
        return {} if self._runner is None else dict(self._runner.ranks)

    @property
    def num_started(self) -> int:
        """Processes of ranks that were started until now."""
        return 0 if self._runner is None else self._runner.num_started

    @property
    def lost_pids(self) -> set[int]:
        """The process ids of those that have ended badly."""
        return set() if self._runner is None else self._runner.lost_pids

    def run(self) -> None:
        try:
            from .elastic import count_ranks

            num_ranks = count_ranks(self.order.job, self.order.num_ranks)
            self.num_ranks = num_ranks
            if not self._stop_asked.signum:
                self._run(num_ranks)
        except XdsError as error:
            self.error = error
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self.fault = f"the ranks cannot be started: {reason}"

    @abstractmethod
    def _run(self, num_ranks: int) -> None: ...


@final
class Units(HostUnits):
    """The ranks of the only machine, with the decider and the store."""

    def _run(self, num_ranks: int) -> None:
        from ...ops.watch.store import Store
        from ...recovery.decider import Decider, Place
        from ...recovery.generations import Lighthouse
        from ...recovery.slots import all_folders, are_complete
        from .rendezvous_store import serve

        order = self.order
        rendezvous, store = serve(order.rendezvous)
        assert store is not None
        self.store_reference = store
        self.order = order = replace(order, rendezvous=rendezvous)
        lighthouse = Lighthouse(Store(store, "recovery", -1, order.key), num_ranks)
        place = Place("", tuple(range(num_ranks)), num_ranks)
        decider = Decider(lighthouse, [place], order.job.num_spares)
        runner = self._runner = Runner(
            *(order, self.folder, self._extra, num_ranks), queue.SimpleQueue()
        )
        takes_over = are_complete(os.getpid())
        if takes_over:
            decider.launcher_killed()
        try:
            runner.begin(starts=not takes_over)
            self._follow(runner, decider)
        finally:
            runner.end()
            for path in glob(all_folders(os.getpid())):
                shutil.rmtree(path, ignore_errors=True)
        failed = decider.failed
        self.failures = {rank: one for rank, one in runner.failures.items() if rank in failed}

    def _follow(self, runner: Runner, decider: Decider) -> None:
        now = time.monotonic()
        self._do(runner, decider)  # of a launcher that takes over
        while not decider.is_done:
            found = runner.look(LOOK_FOR_NEW_SECONDS if decider.is_waiting else LOOK_SECONDS)
            if self._stop_asked.signum:
                decider.asked_to_end()
            for event in found:
                tell_decider(decider, 0, event)
            before, now = now, time.monotonic()
            decider.look(now - before)
            self._do(runner, decider)

    def _do(self, runner: Runner, decider: Decider) -> None:
        from ...recovery.decider import Fill, Kill, Tell

        for command in decider.take_commands():
            if isinstance(command, Tell):
                write_stderr(f"xds: {command.text}\n", self._stop_asked.is_requested)
            elif isinstance(command, Fill):
                runner.fill(command)
            elif isinstance(command, Kill):
                runner.kill(command.ranks)
            else:
                self.is_ending = True
                runner.ask_to_end()


@final
class UnitsOfHead(HostUnits):
    """The ranks of one of several hosts. The head has the decider and the store.

    The node part removes what they leave in memory (see remote/holding.py).
    """

    def __init__(
        self,
        order: Order,
        folder: RunFolder,
        stop: Stop,
        extra: dict[str, str],
        line: HeadLine,
    ) -> None:
        super().__init__(order, folder, stop, extra)
        self._line = line

    def _run(self, num_ranks: int) -> None:
        from ...recovery.decider import Fill, Kill

        given = (self.order, self.folder, self._extra, num_ranks)
        runner = self._runner = Runner(*given, self._line.commands)
        is_over = False
        try:
            runner.begin(starts=not self.order.takes_over)
            while runner.is_running or not (is_over or self._stop_asked.signum):
                for each in runner.look(LOOK_SECONDS):
                    if isinstance(each, Ended | Stopped):
                        self._line.events.put(each)
                    elif isinstance(each, Fill):
                        self._line.attempts[each.rank] = each.attempt
                        runner.fill(each)
                    elif isinstance(each, Kill):
                        runner.kill(each.ranks)
                    else:
                        is_over = True
        finally:
            runner.end()
            self._line.events.put(None)
        self.failures = runner.failures  # the head knows which of them count


__all__ = [
    "Ended",
    "Finish",
    "HeadLine",
    "HostUnits",
    "Stopped",
    "Units",
    "UnitsOfHead",
    "tell_decider",
]
