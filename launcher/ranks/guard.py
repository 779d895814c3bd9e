"""The guard process: kills the child processes of the ranks after their launcher was killed.

    python -I -S guard.py      standard input: the process id of each rank, one per line; at a normal end "done"
                               "remove /dev/shm/name-*": folders to remove
                               "keeper 12": the process that starts another launcher, and removes the folders

The kernel kills a rank when its launcher is killed (see worker.py), but not the rank's child processes. So each
launcher starts a guard process, in its own process group. The guard's standard input closes when the launcher
ends for any reason. Then the guard kills every process in the ranks' sessions, and says so. A session also
includes children of children, even after their parent has exited, and in any process group.

It also removes what ranks have left in shared memory, of which the launcher gives the pattern.

The guard is started by its path and imports only the standard library. It starts within milliseconds, while the
launcher imports torch.
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

HELPERS_SECONDS = 0.5  # time for trackers of shared memory to clean up after their rank has ended
_GIVE_UP_SECONDS = 2.0
_TICK_SECONDS = 0.02
_DONE, _REMOVE, _KEEPER = b"done\n", b"remove ", b"keeper "
LAUNCHER_KILLED = (
    "xds: the launcher was killed, so all its ranks have ended; "
    "start the run again from its last checkpoint\n"
)


def members(sessions: Iterable[int]) -> list[int]:
    """The running processes of sessions. A session is given by the id of its first process."""
    wanted = set(sessions)
    found = []
    for name in os.listdir("/proc") if wanted else ():
        if name.isdecimal():
            fields = stat(int(name))
            if fields and int(fields[3]) in wanted and fields[0] not in "ZX":
                found.append(int(name))
    return found


def end_sessions(sessions: Iterable[int], patience_seconds: float) -> None:
    """Wait `patience_seconds`, then kill the remaining processes of sessions, including new ones."""
    begun, wanted = time.monotonic(), list(sessions)
    while left := members(wanted):
        waited_seconds = time.monotonic() - begun
        if waited_seconds > patience_seconds:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if waited_seconds > patience_seconds + _GIVE_UP_SECONDS:
            return  # a process in uninterruptible sleep: the kernel ends it later
        time.sleep(_TICK_SECONDS)


def stat(pid: int) -> list[str]:
    """State, parent, group, session, ... of a process; [] if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            # "pid (name) state ...": the name may hold spaces and brackets
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def started(pid: int) -> str:
    """The start time of a process in kernel ticks; "" if it does not exist."""
    fields = stat(pid)
    return fields[19] if fields else ""


def still_ours(ranks: Mapping[int, str]) -> list[int]:
    """The ranks, given with their start times, whose process id has not been reused by another process."""
    return [pid for pid, at in ranks.items() if started(pid) in ("", at)]


@final
class Guard:
    """The launcher's side: a context that runs the guard process and sends it the process ids of the ranks."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Guard:
        if sys.platform == "linux" and sys.executable:
            with contextlib.suppress(OSError):  # no process can be started: run without a guard
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__],
                    cwd="/",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    bufsize=0,
                )
        return self

    def watch(self, pid: int) -> None:
        """Add the rank with process id `pid`, which leads a session."""
        self._send(b"%d\n" % pid)

    def remove(self, pattern: str) -> None:
        """Add folders that outlive the ranks."""
        self._send(_REMOVE + os.fsencode(pattern) + b"\n")

    def leave_to(self, keeper: int) -> None:
        """If the launcher is killed and the process `keeper` is not, folders and words are left to that."""
        self._send(_KEEPER + b"%d\n" % keeper)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._send(_DONE)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the guard is stopped
                self._process.wait(_GIVE_UP_SECONDS)

    def _send(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # the guard was killed
                self._process.stdin.write(line)


def main() -> None:
    os.setpgid(0, 0)  # not in the launcher's group, so that it survives a kill of that group
    ignored = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU)
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)
    ranks: dict[int, str] = {}
    patterns: list[str] = []
    keeper: dict[int, str] = {}
    for line in sys.stdin.buffer:
        if line == _DONE:
            return
        if line.startswith(_REMOVE):
            patterns.append(os.fsdecode(line.removeprefix(_REMOVE).rstrip()))
            continue
        if line.startswith(_KEEPER):
            pid = int(line.removeprefix(_KEEPER))
            keeper[pid] = started(pid)
            continue
        pid = int(line)
        ranks[pid] = started(pid)
    end_sessions(still_ours(ranks), HELPERS_SECONDS)
    if any(started(pid) == at and stat(pid)[0] not in "ZX" for pid, at in keeper.items()):
        return
    _remove(patterns)
    if ranks:
        with contextlib.suppress(OSError):  # nobody reads
            os.write(2, LAUNCHER_KILLED.encode())


def _remove(patterns: Iterable[str]) -> None:
    import shutil  # a guard that has nothing to do starts without them
    from glob import glob

    for pattern in patterns:
        for path in glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
