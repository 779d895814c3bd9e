"""The parent of the launcher of a run with recovery: it starts another launcher if that is killed.

    xds --recover    keeper ──> launcher: store, decider ──> ranks
                       │        is killed, and its ranks with it (see worker.py)
                       └──────> another launcher ──> ranks that begin with the versions in memory

Only versions of the states outlive the ranks. So the keeper does so where the ranks hold one copy of the states
and each has a complete version; or where hosts hold them, which the head of several hosts has noted. It imports
no torch and holds nothing, so a full memory ends it last.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import shutil
import signal
import time
from glob import glob
from types import FrameType
from typing import final

from ...recovery import slots
from ...utils.messages import write_stderr
from .guard import LAUNCHER_KILLED
from .stop import FORWARDED, STOPPING

MOST_LAUNCHERS = 3  # that are killed within STEADY_SECONDS of their start, one after another
STEADY_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
# a process that is killed has one of these, and a launcher that is asked to end has none
_KILLED = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL)


@final
class Keeper:
    """Starts launchers. `run` returns in each of them, and at the end in the keeper.

    run_id: the same in all launchers. num_killed: launchers before this one.
    """

    def __init__(self) -> None:
        self.run_id = secrets.token_hex(8)
        self.num_killed = 0
        self._pid = os.getpid()
        self._launcher = 0
        self._noted = mmap.mmap(-1, 1)  # shared with all launchers
        self._is_asked = False  # the user ends the run

    def run(self) -> int | None:
        """In a launcher None; in the keeper, when the last launcher has ended, the exit code of the run."""
        before = {}
        for signum in (*STOPPING, *FORWARDED, signal.SIGWINCH, signal.SIGTSTP):
            # ignored under nohup, or for a job in the background; Ctrl-Z: a stopped launcher sees no failure
            is_ignored = signal.getsignal(signum) is signal.SIG_IGN or signum == signal.SIGTSTP
            before[signum] = signal.signal(signum, signal.SIG_IGN if is_ignored else self._pass_on)
        former = num_in_turn = 0
        while True:
            begun = time.monotonic()
            # a signal that comes meanwhile is for the launcher that begins
            signal.pthread_sigmask(signal.SIG_BLOCK, before)
            self._launcher = os.fork()
            if not self._launcher:
                for signum, handler in before.items():
                    signal.signal(signum, handler)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
                self._be_launcher(former)
                return None
            signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
            code = os.waitstatus_to_exitcode(os.waitpid(self._launcher, 0)[1])
            former, self._launcher = self._launcher, 0
            self.num_killed += 1
            num_in_turn = num_in_turn + 1 if time.monotonic() - begun < STEADY_SECONDS else 1
            is_killed = -code in _KILLED and not self._is_asked
            has_versions = slots.are_complete(former) or bool(self._noted[0])
            if not is_killed or num_in_turn > MOST_LAUNCHERS or not has_versions:
                for path in glob(slots.all_folders(former)):
                    shutil.rmtree(path, ignore_errors=True)
                if is_killed:
                    write_stderr(LAUNCHER_KILLED)
                return code if code >= 0 else 128 - code
            how = signal.Signals(-code).name
            write_stderr(
                f"xds: the launcher was ended by {how}: another one starts, and new ranks\n"
            )

    def _be_launcher(self, former: int) -> None:
        # Not in the group of the keeper, which passes on each signal of the terminal once
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != self._pid:
            os._exit(1)
        if slots.are_complete(former):
            slots.take_over(former)

    def note_versions(self, *, on_hosts: bool) -> None:
        """In the head of several hosts: they hold versions of all ranks from now on, or hold none."""
        self._noted[0] = on_hosts

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        self._is_asked |= signum in STOPPING
        if self._launcher:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._launcher, signum)


__all__ = ["Keeper"]
