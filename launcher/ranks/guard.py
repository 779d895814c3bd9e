"""Ends what ranks had started, once their launcher was killed.

    python -I -S guard.py      standard input: a line for each rank, its process id; "done" before a usual end

The kernel kills a rank along with its launcher (see worker.py), but nothing that the rank had started. So each
launcher has this process beside it, in a process group of its own. Its input ends with the launcher, however
that ends. Then it ends every process of the ranks' sessions. A child of a child belongs to the session as well,
whoever its parent is by now, and in whatever process group.

Started by its path, with the standard library alone: it takes a few milliseconds, while torch is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import final

HELPERS_SECONDS = 0.5  # for trackers of shared memory to clean up once their rank is gone
_GIVE_UP_SECONDS = 2.0
_TICK_SECONDS = 0.02
_DONE = b"done\n"


def members(sessions: Iterable[int]) -> list[int]:
    """The living processes of sessions, by the ids of the processes that began them."""
    wanted = set(sessions)
    found = []
    for name in os.listdir("/proc") if wanted else ():
        if name.isdecimal():
            fields = _stat(int(name))
            if fields and int(fields[3]) in wanted and fields[0] not in "ZX":
                found.append(int(name))
    return found


def end_sessions(sessions: Iterable[int], patience_seconds: float) -> None:
    """Kill what is left of sessions after a while, and what that has started meanwhile."""
    begun, wanted = time.monotonic(), list(sessions)
    while left := members(wanted):
        waited_seconds = time.monotonic() - begun
        if waited_seconds > patience_seconds:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if waited_seconds > patience_seconds + _GIVE_UP_SECONDS:
            return  # one in uninterruptible sleep: the kernel ends it when it can
        time.sleep(_TICK_SECONDS)


def _stat(pid: int) -> list[str]:
    """State, parent, group, session, ... of a process; [] where there is none."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            # "pid (name) state ...": the name may hold spaces and brackets
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def started(pid: int) -> str:
    """When the kernel started a process, in its own ticks; "" where there is none."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def still_ours(ranks: Mapping[int, str]) -> list[int]:
    """Of ranks, with when each was started, those whose number no other process has got since."""
    return [pid for pid, at in ranks.items() if started(pid) in ("", at)]


@final
class Guard:
    """The launcher's end: tells the guard which ranks there are, for as long as the context lasts."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Guard:
        if sys.platform == "linux" and sys.executable:
            with contextlib.suppress(OSError):  # no process to be had: then it must do without
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__],
                    cwd="/",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                )
        return self

    def watch(self, pid: int) -> None:
        """`pid` leads the session of a rank."""
        self._send(b"%d\n" % pid)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._send(_DONE)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # somebody stopped it
                self._process.wait(_GIVE_UP_SECONDS)

    def _send(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # somebody killed it
                self._process.stdin.write(line)


def main() -> None:
    os.setpgid(0, 0)  # who kills the launcher's group spares it
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    ranks: dict[int, str] = {}
    for line in sys.stdin.buffer:
        if line == _DONE:
            return
        pid = int(line)
        ranks[pid] = started(pid)
    end_sessions(still_ours(ranks), HELPERS_SECONDS)


if __name__ == "__main__":
    main()
