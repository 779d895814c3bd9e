"""The worker processes of the launcher, read from /proc: finds, monitors, signals and kills them.

torch's elastic agent starts and reaps the workers, but provides neither their process ids while they run
nor the time at which each one ended. The ids are needed to forward signals and to stop a worker that ignores
them. The times are needed to determine which rank failed first.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from .failure import SAVED_AND_LEFT
from .guard import HELPERS_SECONDS, Guard, end_sessions, started, still_ours


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

    def kill_remaining(self) -> None:
        """After a failure: wait briefly for the child processes of the workers, then kill the rest."""
        end_sessions(still_ours(self._began), HELPERS_SECONDS)

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
    own_pid = os.getpid()
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks_a_second = os.sysconf("SC_CLK_TCK")
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:  # has ended in the meantime
            continue
        # "pid (name) state ppid pgrp session ...": the name may hold spaces and brackets
        fields = stat.rpartition(")")[2].split()
        if int(fields[1]) == own_pid and int(fields[3]) == int(entry.name):
            found[int(entry.name)] = booted_at + int(fields[19]) / ticks_a_second
    return found
