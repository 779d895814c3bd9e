"""Runs the ranks of one host once, from their start to the end of the last one, and returns the outcome.

    main thread                         agent thread
    signals, deadlines                  elastic.py: torch's rendezvous, start and monitoring
          |                                   |
          +----- finds, signals, kills -------+-----> worker.py, one for each rank, each a session

The agent runs in a thread, so that this module handles the signals. torch's own handling may take 30 s, and a
second signal in that time makes it lose track of its workers. The agent starts and reaps the workers, but gives
neither their process ids while they run nor the time at which each one ended. So both are read from /proc.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ...utils.errors import XdsError
from ..job import Order
from .failure import SAVED_AND_LEFT, Failure, last_lines, report, was_preempted
from .guard import HELPERS_SECONDS, Guard, end_sessions, started, stat, still_ours
from .run_folder import RunFolder
from .stop import Stop
from .units import HeadLine, HostUnits, Units, UnitsOfHead

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_TICK_SECONDS = 0.05
# After a failure: the time limit for the rank to clean up (flush logs, send metrics), and then for its peers.
_FAILED_RANK_SECONDS = 6.0
_PEERS_SECONDS = 3.5
_GIVE_UP_AFTER_SECONDS = 10.0
_STUCK_AGENT_SECONDS = 1.0
_FAULT_CHARS = 16_384


@final
@dataclass
class Outcome:
    """How the ranks of this host ended.

    error: why the ranks could not be started, or why torch's agent failed; "" otherwise.
    store_reference: keeps the rendezvous store open if this process serves it.
    is_agent_alive: the agent still waits for other hosts (for the rendezvous, or the end of their ranks).
    """

    failures: list[Failure] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    error: str = ""
    is_agent_alive: bool = False
    store_reference: object = None


def supervise(
    order: Order,
    folder: RunFolder,
    stop: Stop,
    extra: dict[str, str],
    on_failure: Callable[[], None] | None = None,
    line: HeadLine | None = None,
) -> Outcome:
    """Run the ranks of `order` to their end, or until `stop` is requested.

    Args:
        extra: environment variables for rank 0.
        on_failure: called once, as soon as the first rank has failed; others may still run.
        line: to the head, which decides what happens to ranks of a run with recovery on several hosts.
    Raises:
        XdsError: this host lacks the requested devices or backend.
    """
    if order.generation:
        gc.collect()  # torch keeps the previous start's store, thread and sockets alive in a reference cycle
    with Guard() as guard:
        if order.job.recovers:
            from ...recovery.slots import all_folders

            guard.remove(all_folders(os.getpid()))
            if not order.counts:  # on one machine
                guard.leave_to(os.getppid())
        agent, workers = _agent(order, folder, stop, extra, line), Workers(guard)
        agent.start()
        _supervise(agent, workers, stop, on_failure)
        if agent.error is not None:
            raise agent.error
        outcome = Outcome(is_agent_alive=agent.is_alive(), store_reference=agent.store_reference)
        if stop.signum or agent.failures or agent.fault:
            workers.kill_remaining()
        else:  # the run went on without them
            workers.kill_remaining(agent.lost_pids)
    outcome.error = agent.fault
    if outcome.is_agent_alive:
        outcome.failures = _recorded_failures(agent, folder)
    else:
        failed = agent.failures.items()
        outcome.failures = [
            _failure(rank, process_failure, workers, folder) for rank, process_failure in failed
        ]
    ranks = agent.ranks()
    outcome.finished = [rank for rank in ranks.values() if folder.ended(rank).exists()]
    if stop.signum:
        folder.record(f"stopped by {signal.Signals(stop.signum).name}")
    elif outcome.failures:
        saved = "every rank has saved a checkpoint and stopped, as requested"
        is_save = was_preempted(outcome.failures)
        folder.record(saved if is_save else report(outcome.failures, outcome.finished))
    return outcome


def _agent(
    order: Order, folder: RunFolder, stop: Stop, extra: dict[str, str], line: HeadLine | None
) -> _Agent | HostUnits:
    if not order.job.recovers:
        return _Agent(order, folder, stop, extra)
    if line is None:
        return Units(order, folder, stop, extra)
    return UnitsOfHead(order, folder, stop, extra, line)


@dataclass(frozen=True)
class Exit:
    """How and when a worker ended; `status` is negative for a signal, None if it is unknown."""

    time_seconds: float
    status: int | None


@final
class Workers:
    """The direct children of this process that lead a session: one for each rank."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.exits: dict[int, Exit] = {}
        # killed by the launcher, so they are not the cause of a failure
        self.killed: set[int] = set()
        self._watched: dict[int, float] = {}  # pid to start time
        self._began: dict[int, str] = {}  # the same in kernel ticks

    def find(self) -> None:
        """Find workers that have started since the last call, and monitor them."""
        for pid, started_at in _session_leading_children().items():
            if pid not in self._watched:
                self._watched[pid] = started_at
                self._began[pid] = started(pid)
                self._guard.watch(pid)
                threading.Thread(target=self._watch, args=(pid,), daemon=True).start()

    def alive(self, started_before_seconds: float = math.inf) -> list[int]:
        """The running workers that started before a time (wall clock). Later ones belong to a restart."""
        return [
            pid
            for pid, started_at in self._watched.items()
            if pid not in self.exits and started_at < started_before_seconds
        ]

    def first_bad_exit_seconds(self) -> float | None:
        """The time at which the first failed worker ended; None if none has failed.

        A worker that saved a checkpoint and exited on request has not failed.
        """
        fine = (0, SAVED_AND_LEFT)
        times = [exit_.time_seconds for exit_ in self.exits.values() if exit_.status not in fine]
        return min(times, default=None)

    def send(self, pid: int, signum: int) -> None:
        """Send a signal to one worker. SIGTERM also goes to its child processes.

        SIGKILL goes only to the worker. Its helpers unlink shared memory after it ends, see `kill_remaining`.
        """
        if signum == signal.SIGKILL:
            self.killed.add(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if signum == signal.SIGTERM:
                os.killpg(pid, signum)
            else:
                os.kill(pid, signum)

    def kill_remaining(self, pids: Collection[int] | None = None) -> None:
        """After a failure: wait briefly for the child processes of the workers, then kill the rest.

        pids: of the workers that have failed; None: all.
        """
        began = {pid: at for pid, at in self._began.items() if pids is None or pid in pids}
        end_sessions(still_ours(began), HELPERS_SECONDS)

    def _watch(self, pid: int) -> None:
        status: int | None = None
        # WNOWAIT does not reap: the agent must still be able to wait for its child
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if ended is not None:
                is_exit = ended.si_code == os.CLD_EXITED
                status = ended.si_status if is_exit else -ended.si_status
        self.exits[pid] = Exit(time.time(), status)


def _session_leading_children() -> dict[int, float]:
    """The start time of each by process id (wall clock, accurate to 10 ms)."""
    own_pid = str(os.getpid())
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks_a_second = os.sysconf("SC_CLK_TCK")
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        fields = stat(int(pid))
        if fields and fields[1] == own_pid and fields[3] == pid:
            found[int(pid)] = booted_at + int(fields[19]) / ticks_a_second
    return found


@final
class _Agent(threading.Thread):
    """A thread that runs torch's agent and stores its result."""

    is_ending = True  # when one rank fails
    num_started = 0  # beside those of the start
    lost_pids: Collection[int] = ()  # without which the run went on

    def __init__(self, order: Order, folder: RunFolder, stop: Stop, extra: dict[str, str]) -> None:
        super().__init__(name="xds-agent", daemon=True)
        self.num_ranks = 0  # until it is known
        self.failures: dict[int, ProcessFailure] = {}  # by rank
        self.error: XdsError | None = None
        self.fault = ""
        self.store_reference: object = None  # see launch
        self.folder, self.order = folder, order
        self._stop_asked, self._extra = stop, extra
        self._ranks: dict[int, int] = {}

    def ranks(self) -> dict[int, int]:
        """Rank by local rank; empty until the rendezvous is over."""
        return dict(self._ranks)

    def run(self) -> None:
        try:
            import_torch()
            from .elastic import count_ranks, launch

            # first the number, then the look at the signal: without a number `_supervise` leaves at a signal
            self.num_ranks = count_ranks(self.order.job, self.order.num_ranks)
            if not self._stop_asked.signum:
                self.failures, self.store_reference = launch(
                    self.order, self.num_ranks, self.folder, self._ranks, self._extra
                )
        except XdsError as error:
            self.error = error
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self.fault = f"the ranks cannot be started: {reason}"
            if "EADDRINUSE" in reason:
                self.fault = (
                    f"the port of {self.order.rendezvous.endpoint} is in use on this machine, by another run "
                    "or program: set another with --master-port, or on one machine leave it out for a free one"
                )
            if self._ranks and self.order.rendezvous.max_nodes > 1:
                self.fault = (
                    f"the rendezvous endpoint {self.order.rendezvous.endpoint} no longer answers: xds has "
                    f"ended on that machine; see its output there for the cause ({reason})"
                )


# held while torch is imported. A second import of one of its modules at that time would raise errors in both.
_importing = threading.Lock()


def import_torch() -> None:
    """Import torch with its C++ log turned off, because the failure report covers lost peers.

    For several threads: the others wait.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    with _importing:
        former = os.environ.get(name)
        os.environ[name] = former or "FATAL"
        try:
            # torch without NumPy warns; the ranks show that warning themselves
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from . import elastic  # noqa: F401
        finally:
            if former is None:
                del os.environ[name]  # the ranks keep torch's default


def _supervise(
    agent: _Agent | HostUnits, workers: Workers, stop: Stop, on_failure: Callable[[], None] | None
) -> None:
    """Wait for the agent, and send the workers the signals that are due."""
    sent: set[tuple[int, int]] = set()
    stopped_since, num_started = 0.0, 0
    while agent.is_alive():
        agent.join(_TICK_SECONDS)
        is_new, num_started = agent.num_started != num_started, agent.num_started
        if stop.signum or is_new or len(workers.alive()) < agent.num_ranks:
            workers.find()  # reads all of /proc
        _forward(workers, stop)
        for pid, signum in _signals_due(agent, workers, stop):
            if (pid, signum) not in sent:
                sent.add((pid, signum))
                workers.send(pid, signum)
        if on_failure is not None and _failed_at(agent, workers) is not None:
            on_failure()
            on_failure = None
        if not stop.signum:
            continue
        if not agent.num_ranks:
            return  # torch is being imported; no rank will be started after it
        now = time.monotonic()
        stopped_since = 0.0 if workers.alive() else stopped_since or now
        if stopped_since and now - stopped_since > _STUCK_AGENT_SECONDS:
            return  # the agent waits for other hosts
        if now - stop.since_seconds > _GIVE_UP_AFTER_SECONDS + agent.folder.grace_seconds():
            return  # a rank in uninterruptible sleep: the kernel ends it later


def _forward(workers: Workers, stop: Stop) -> None:
    while stop.forwards:
        signum = stop.forwards.pop(0)
        for pid in workers.alive():
            workers.send(pid, signum)


def _signals_due(agent: _Agent | HostUnits, workers: Workers, stop: Stop) -> list[tuple[int, int]]:
    """(pid, signal) that running workers should have received by now."""
    if stop.signum:
        due = stop.due(agent.folder.grace_seconds())
        return [(pid, due) for pid in workers.alive()]
    if not agent.is_ending:
        return []
    # after the end of a rank the agent stops its peers with a limit of 30 s; before that it waits
    late: list[int] = []
    ended_at = workers.first_bad_exit_seconds()
    if ended_at is not None and time.time() - ended_at > _PEERS_SECONDS:
        late += workers.alive(started_before_seconds=ended_at)
    reported_at = agent.folder.first_error_seconds(list(agent.ranks().values()))
    if reported_at is not None and time.time() - reported_at > _FAILED_RANK_SECONDS:
        late += workers.alive(started_before_seconds=reported_at)
    return [(pid, int(signal.SIGKILL)) for pid in late]


def _failed_at(agent: _Agent | HostUnits, workers: Workers) -> float | None:
    ended_at = workers.first_bad_exit_seconds()
    reported_at = agent.folder.first_error_seconds(list(agent.ranks().values()))
    return min((at for at in (ended_at, reported_at) if at is not None), default=None)


def _recorded_failures(agent: _Agent | HostUnits, folder: RunFolder) -> list[Failure]:
    """The failures that the ranks recorded themselves, used if the agent does not return."""
    found = []
    for rank in agent.ranks().values():
        try:
            record = json.loads(folder.error(rank).read_text())
        except (OSError, ValueError):
            continue
        found.append(_recorded_failure(rank, 0, record["xds"], folder))
    return found


def _recorded_failure(rank: int, pid: int, record: dict[str, Any], folder: RunFolder) -> Failure:
    """The failure that a rank recorded itself (worker.py). It takes precedence over a crash during exit."""
    failure = Failure(rank, pid, record["exit_code"], record["time_seconds"], text=record["text"])
    return _with_host_and_log(failure, folder)


def _failure(
    rank: int, process_failure: ProcessFailure, workers: Workers, folder: RunFolder
) -> Failure:
    """One rank's failure, from its own record, from the kernel, and from torch."""
    record = process_failure.error_file_data.get("xds")
    if record is not None:
        return _recorded_failure(rank, process_failure.pid, record, folder)
    seen = workers.exits.get(process_failure.pid)
    signum = max(0, -process_failure.exitcode)
    failure = Failure(
        rank=rank,
        pid=process_failure.pid,
        exit_code=128 + signum if signum else process_failure.exitcode,
        time_seconds=seen.time_seconds if seen else float(process_failure.timestamp),
        signum=signum,
        text=_frames(folder.fault(rank)),
        was_killed_by_us=process_failure.pid in workers.killed,
    )
    return _with_host_and_log(failure, folder)


def _with_host_and_log(failure: Failure, folder: RunFolder) -> Failure:
    log = folder.log(failure.rank)
    has_log = log.exists() and log.stat().st_size > 0
    return replace(
        failure,
        host=socket.gethostname(),
        log=str(folder.shown() / log.name) if has_log else "",
        tail=() if failure.text else last_lines(log, folder.log_begins.get(failure.rank, 0)),
    )


def _frames(fault_file: Path) -> str:
    """Python's dump of a crash, without the frames of worker.py and the list of extension modules."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = fault_file.read_text(errors="replace")[:_FAULT_CHARS].splitlines()
    own = str(Path(__file__).with_name("worker.py"))
    record = [
        line for line in lines if own not in line and not line.startswith("Extension modules:")
    ]
    return "\n".join(record)
