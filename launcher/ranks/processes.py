"""The launcher's workers as the kernel shows them: found, watched, signalled, swept.

torch's elastic agent starts and reaps the workers but hands out neither their ids while they run
nor the moment at which each one died. Both are needed: the ids to forward a signal and to stop a
worker that ignores it, the moments to say which rank failed first.
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
    """How and when a worker ended; `status` is negative for a signal, None when it was not seen."""

    time_seconds: float
    status: int | None


@final
class Workers:
    """The direct children of this process that lead a session of their own: one for each rank."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.exits: dict[int, Exit] = {}
        self.killed: set[int] = set()  # by us, so their end says nothing about the cause
        self._watched: dict[int, float] = {}  # pid to the time it was started
        self._began: dict[int, str] = {}  # the same in the kernel's ticks

    def find(self) -> None:
        """Take note of workers that have started since the last call."""
        for pid, started_at in _session_leading_children().items():
            if pid not in self._watched:
                self._watched[pid] = started_at
                self._began[pid] = started(pid)
                self._guard.watch(pid)
                threading.Thread(target=self._watch, args=(pid,), daemon=True).start()

    def alive(self, started_before_seconds: float = math.inf) -> list[int]:
        """Workers that run; those started before a time (wall clock) only: a later one is a restart."""
        return [
            pid
            for pid, started_at in self._watched.items()
            if pid not in self.exits and started_at < started_before_seconds
        ]

    def first_bad_exit_seconds(self) -> float | None:
        """The time at which the first worker that failed ended, None while none has.

        One that has saved and left as it was asked to has not failed: its peers come after it.
        """
        fine = (0, SAVED_AND_LEFT)
        times = [exit_.time_seconds for exit_ in self.exits.values() if exit_.status not in fine]
        return min(times, default=None)

    def send(self, pid: int, signum: int) -> None:
        """Signal one worker; SIGTERM goes to all it started as well.

        SIGKILL spares its helpers at first: they unlink shared memory once it is gone, see `sweep`.
        """
        if signum == signal.SIGKILL:
            self.killed.add(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if signum == signal.SIGTERM:
                os.killpg(pid, signum)
            else:
                os.kill(pid, signum)

    def kill_remaining(self) -> None:
        """After a failure: wait a moment for what the workers started, then kill what is left."""
        end_sessions(still_ours(self._began), HELPERS_SECONDS)

    def _watch(self, pid: int) -> None:
        status: int | None = None
        # WNOWAIT looks without reaping: the agent must still find its child
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if ended is not None:
                is_exit = ended.si_code == os.CLD_EXITED
                status = ended.si_status if is_exit else -ended.si_status
        self.exits[pid] = Exit(time.time(), status)


def _session_leading_children() -> dict[int, float]:
    """By process id, when each was started (wall clock, to 10 ms)."""
    own_pid = os.getpid()
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks_a_second = os.sysconf("SC_CLK_TCK")
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:  # gone meanwhile
            continue
        # "pid (name) state ppid pgrp session ...": the name may hold spaces and brackets
        fields = stat.rpartition(")")[2].split()
        if int(fields[1]) == own_pid and int(fields[3]) == int(entry.name):
            found[int(entry.name)] = booted_at + int(fields[19]) / ticks_a_second
    return found
