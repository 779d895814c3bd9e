"""Delivers signals as bytes in a pipe, which a thread reads while the main thread is blocked in a collective.

Python runs signal handlers only between two bytecode instructions of the main thread. A main thread that
waits in a collective for minutes runs none. Python's C code writes to the "wakeup" pipe immediately.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from types import FrameType
from typing import Any, final

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: usually sent by Slurm's --signal
_READ_BYTES = 4096
_living: Signals | None = None


@final
class Signals:
    """The signal handlers of one process. The former handlers are called as well.

    A signal that is ignored, as under nohup, stays ignored. Forked children get the former handlers.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._before: dict[int, Any] = {}
        # True: Python's C code writes to our pipe. False: the handlers do, when Python runs them.
        self._wakes = False
        self._is_installed = False

    def install(self) -> bool:
        """Install the handlers. Returns False outside of the main thread, the only one that can."""
        global _living
        if threading.current_thread() is not threading.main_thread():
            return False
        for signum in STOP_SIGNALS:
            former = signal.getsignal(signum)
            if former is not signal.SIG_IGN and former is not None:  # None: it belongs to C code
                self._before[signum] = former
                signal.signal(signum, self._handle)
        former_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._wakes = former_fd == -1
        if not self._wakes:
            signal.set_wakeup_fd(former_fd)
        self._is_installed, _living = True, self
        return True

    def restore(self) -> None:
        """Restore the former handlers, except where other code has installed its own since."""
        global _living
        if not self._is_installed:
            return
        self._is_installed = False
        if _living is self:
            _living = None
        # ValueError: not the main thread; `_handle` then acts like the former handler
        with contextlib.suppress(ValueError):
            if self._wakes:
                current = signal.set_wakeup_fd(-1)
                if current not in (-1, self._write_fd):
                    signal.set_wakeup_fd(current)
            for signum, former in self._before.items():
                if signal.getsignal(signum) == self._handle:
                    signal.signal(signum, former)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        former = self._before[signum]
        if self._is_installed and not self._wakes:
            with contextlib.suppress(OSError):
                os.write(self._write_fd, bytes([signum]))
        if callable(former):
            former(signum, frame)
        elif not self._is_installed:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def read(self, timeout_seconds: float) -> list[int]:
        """Wait for signals and return their numbers; 0 stands for `wake`."""
        ready, _, _ = select.select([self._read_fd], [], [], timeout_seconds)
        if not ready:
            return []
        with contextlib.suppress(BlockingIOError):
            received = os.read(self._read_fd, _READ_BYTES)
            return [byte for byte in received if not byte or byte in STOP_SIGNALS]
        return []

    def wake(self) -> None:
        """Make `read` return."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"\0")

    def close(self) -> None:
        """Close the pipe. Call it after `restore`, when no thread reads any more."""
        os.close(self._read_fd)
        os.close(self._write_fd)


_forking = threading.local()


def _before_fork() -> None:
    """Block the signals until the child has left our pipe: their bytes would go into it."""
    if _living is not None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _in_parent() -> None:
    mask, _forking.mask = getattr(_forking, "mask", None), None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    """Restore the former handlers: a signal to a data-loader worker must not stop the training."""
    if _living is not None:
        _living.restore()
    _in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
