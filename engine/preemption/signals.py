"""Signals as bytes in a pipe: a thread can read them while the main thread is blocked in a collective.

Python runs a handler between two steps of the main thread, so one that waits in a collective for minutes hears
nothing. The byte that Python's own C code writes into the "wakeup" pipe comes at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from types import FrameType
from typing import Any, final

ASKING = (
    signal.SIGTERM,
    signal.SIGUSR1,
)  # SIGUSR1 is what Slurm's --signal is usually told to send
_READ_BYTES = 4096
_living: Signals | None = None


@final
class Signals:
    """The handlers of one process while they are installed. What was there before is called as well.

    A signal that is ignored, as under nohup, stays ignored. Forked children get the former handlers.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._before: dict[int, Any] = {}
        self._wakes = (
            False  # the C code writes into our pipe; else the handlers do, when Python gets to it
        )
        self._is_installed = False

    def install(self) -> bool:
        """False: only the main thread can, and this is another one."""
        global _living
        if threading.current_thread() is not threading.main_thread():
            return False
        for signum in ASKING:
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
        """Put back what was there, unless somebody else has come since."""
        global _living
        if not self._is_installed:
            return
        self._is_installed = False
        if _living is self:
            _living = None
        with contextlib.suppress(
            ValueError
        ):  # from another thread: `_handle` does as the former ones
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
        """The numbers of the signals that have come, as soon as there is one; 0 is `wake`."""
        ready, _, _ = select.select([self._read_fd], [], [], timeout_seconds)
        if not ready:
            return []
        with contextlib.suppress(BlockingIOError):
            return [
                byte for byte in os.read(self._read_fd, _READ_BYTES) if not byte or byte in ASKING
            ]
        return []

    def wake(self) -> None:
        """Let `read` return."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"\0")

    def close(self) -> None:
        """After `restore`, and when nobody reads any more."""
        os.close(self._read_fd)
        os.close(self._write_fd)


_forking = threading.local()


def _before_fork() -> None:
    """A signal to the child must wait until it is the child's own: its byte would go into our pipe."""
    if _living is not None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)


def _in_parent() -> None:
    mask, _forking.mask = getattr(_forking, "mask", None), None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    """A worker of a data loader that is told to stop must not stop the training."""
    if _living is not None:
        _living.restore()
    _in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
