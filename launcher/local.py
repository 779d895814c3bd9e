"""Runs a script once for each device of this machine, and says how that ended.

    main thread                         agent thread
    signals, deadlines, the report      elastic.py: torch's rendezvous, start and watch
          |                                   |
          +----- finds, signals, sweeps ------+-----> worker.py, one for each rank, each a session

The agent has a thread of its own so that signals reach us instead: torch's handling may take 30 s,
and a second signal in that time makes it forget its workers. Rank 0 keeps the terminal and its
progress bars; the others write to files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, final

from ..ops.errors import UsageError, XdsError
from .failure import Failure, first_failure, report
from .processes import Workers
from .run_folder import RunFolder, run_folder

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_TICK_SECONDS = 0.05
# After a failure: how long the rank may tidy up (flush logs, send metrics), and then its peers.
_FAILED_RANK_SECONDS = 6.0
_PEERS_SECONDS = 4.0
# After a signal to the launcher: the same one to the ranks, then harder ones; all of it within 5 s.
_SIGTERM_AFTER_SECONDS = 1.5
_SIGKILL_AFTER_SECONDS = 3.5
_GIVE_UP_AFTER_SECONDS = 10.0
_FAULT_CHARS = 16_384


@dataclass(frozen=True)
class LocalJob:
    """What to run, and how often.

    num_ranks: a number, "auto" (one for each GPU, without one 2), "gpu", or "cpu" (one a core).
    threads_per_rank: OMP_NUM_THREADS of each; None is cores // ranks, unless the variable is set.
    log_dir: None is a temporary folder that goes after a good run.
    """

    kind: Literal["script", "module", "program"]
    target: str
    args: tuple[str, ...] = ()
    num_ranks: int | Literal["auto", "gpu", "cpu"] = "auto"
    backend: Literal["nccl", "gloo", "mpi"] | None = None
    threads_per_rank: int | None = None
    log_dir: Path | None = None


def run(job: LocalJob) -> int:
    """Run `job` to its end; the exit code of the first rank that failed, 0 when none did.

    A rank killed by a signal gives 128 + its number; so does a signal to the launcher itself.

    Raises:
        UsageError: there is no such script, or this machine has not got what was asked for.
        XdsError: torch could not start the ranks.
    """
    if job.kind == "script" and not os.path.exists(job.target):
        raise UsageError(f"script = {job.target!r}: no such file; give the path of a Python script")
    with _stop_signals() as stop, run_folder(job.log_dir) as folder:
        agent = _Agent(job, folder, stop)
        code = _run(agent, stop)
    if agent.is_alive():  # told to stop while it imports torch: leave without waiting for that
        os._exit(code)
    return code


def _run(agent: _Agent, stop: _Stop) -> int:
    workers, folder = Workers(), agent.folder
    agent.start()
    _supervise(agent, workers, stop)
    if not (stop.signum or agent.error or agent.failures):
        return 0
    workers.sweep()
    if stop.signum:
        return 128 + stop.signum
    if agent.error is not None:
        raise agent.error
    failures = [_failure(rank, told, workers, folder) for rank, told in agent.failures.items()]
    finished = [rank for rank in range(agent.num_ranks) if folder.ended(rank).exists()]
    sys.stderr.write(report(failures, finished, folder.logs(agent.num_ranks)))
    folder.is_kept = True
    return first_failure(failures).exit_code


@final
class _Stop:
    """Handler of the signals that ask the launcher to stop, and what it heard."""

    def __init__(self) -> None:
        self.signum = 0
        self.since_seconds = 0.0
        self.is_urgent = False  # asked twice

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.is_urgent = self.signum != 0
        if not self.is_urgent:
            self.signum, self.since_seconds = signum, time.monotonic()
            # not print: a handler may interrupt another write
            os.write(2, f"\nxds: {signal.Signals(signum).name}: stopping every rank\n".encode())


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    stop = _Stop()
    before = {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, or a job in the background
            before[signum] = signal.signal(signum, stop)
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@final
class _Agent(threading.Thread):
    """Runs torch's agent, and keeps what came of it."""

    def __init__(self, job: LocalJob, folder: RunFolder, stop: _Stop) -> None:
        super().__init__(name="xds-agent", daemon=True)
        self.num_ranks = 0  # until it is known
        self.failures: dict[int, ProcessFailure] = {}
        self.error: XdsError | None = None
        self.folder = folder
        self._job, self._stop_signal = job, stop

    def run(self) -> None:
        try:
            from .elastic import count_ranks, launch

            self.num_ranks = count_ranks(self._job)
            if not self._stop_signal.signum:
                self.failures = launch(self._job, self.num_ranks, self.folder)
        except XdsError as error:
            self.error = error
        except Exception as error:
            self.error = XdsError(f"the ranks cannot be started: {type(error).__name__}: {error}")


def _supervise(agent: _Agent, workers: Workers, stop: _Stop) -> None:
    """Wait for the agent; send the workers the signals that are due."""
    sent: set[tuple[int, int]] = set()
    while agent.is_alive():
        agent.join(_TICK_SECONDS)
        if stop.signum or workers.num_found < agent.num_ranks:
            workers.find()
        signum = _signal_due(agent, workers, stop)
        for pid in workers.alive() if signum else ():
            if (pid, signum) not in sent:
                sent.add((pid, signum))
                workers.send(pid, signum)
        if stop.signum and not agent.num_ranks:
            return  # torch is being imported; no rank will be started after it
        if stop.signum and time.monotonic() - stop.since_seconds > _GIVE_UP_AFTER_SECONDS:
            return  # a rank in uninterruptible sleep: the kernel frees it when it can


def _signal_due(agent: _Agent, workers: Workers, stop: _Stop) -> int:
    """The signal that living workers should have had by now, 0 for none."""
    if stop.signum:
        waited_seconds = time.monotonic() - stop.since_seconds
        if stop.is_urgent or waited_seconds > _SIGKILL_AFTER_SECONDS:
            return signal.SIGKILL
        return signal.SIGTERM if waited_seconds > _SIGTERM_AFTER_SECONDS else stop.signum
    # when a rank is gone the agent stops its peers, with 30 s of patience; before that it waits
    gone_at = workers.first_bad_exit_seconds()
    if gone_at is not None and time.time() - gone_at > _PEERS_SECONDS:
        return signal.SIGKILL
    told_at = agent.folder.first_error_seconds(agent.num_ranks)
    if told_at is not None and time.time() - told_at > _FAILED_RANK_SECONDS:
        return signal.SIGKILL
    return 0


def _failure(rank: int, told: ProcessFailure, workers: Workers, folder: RunFolder) -> Failure:
    """One rank's end, from what it wrote itself, what the kernel showed, and what torch noted."""
    kept = told.error_file_data.get("xds")
    if kept is not None:  # its own words count more than an abort on the way out
        return Failure(rank, told.pid, kept["exit_code"], kept["time_seconds"], text=kept["text"])
    seen = workers.exits.get(told.pid)
    signum = max(0, -told.exitcode)
    return Failure(
        rank=rank,
        pid=told.pid,
        exit_code=128 + signum if signum else told.exitcode,
        time_seconds=seen.time_seconds if seen else float(told.timestamp),
        signum=signum,
        text=_frames(folder.fault(rank)),
        was_killed_by_us=told.pid in workers.killed,
    )


def _frames(fault_file: Path) -> str:
    """What Python wrote when it crashed, without our own frames and its list of libraries."""
    if not fault_file.exists():
        return ""
    own = str(Path(__file__).with_name("worker.py"))
    lines = fault_file.read_text(errors="replace")[:_FAULT_CHARS].splitlines()
    kept = [line for line in lines if own not in line and not line.startswith("Extension modules:")]
    return "\n".join(kept)
