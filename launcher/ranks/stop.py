"""Requests to stop the ranks of this machine, and the time limits for it.

A signal handler must not block or fail, so a thread writes its messages.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import final

from ...utils.messages import PATIENCE_SECONDS, write_stderr

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)  # for the script: Slurm's --signal, stack dumps

# After a signal to the launcher: the ranks get the same signal, then SIGTERM, then SIGKILL, all within 5 s.
_SIGTERM_AFTER_SECONDS = 1.5
_SIGKILL_AFTER_SECONDS = 3.5
# `timeout` signals the process and then its group: SIGTERM that comes again so soon is the same request.
_REPEATED_SECONDS = 2.0
# After the failure of a rank on another machine.
_PEER_SIGKILL_AFTER_SECONDS = 3.0


@final
class Stop:
    """The first request to stop, and the signals to forward. Written by signal handlers and threads.

    signum: the requested signal; 0 if there is no request yet.
    is_for_peer: the cause is a failed rank on another host, not the user.
    follower: another Stop that receives the same requests.
    """

    def __init__(self, follower: Stop | None = None) -> None:
        self.follower = follower
        self.signum = 0
        self.since_seconds = 0.0
        self.is_urgent = False  # requested twice
        self.is_for_peer = False
        self.forwards: list[int] = []

    def request(self, signum: int, *, is_for_peer: bool = False) -> bool:
        """Request a stop with `signum`; a second request is urgent. Returns True for the first.

        A second SIGTERM within two seconds is the same request, a second Ctrl-C is not.
        """
        if self.follower is not None:
            self.follower.request(signum, is_for_peer=is_for_peer)
        if self.signum:
            is_same = signum == self.signum == signal.SIGTERM and not self.is_for_peer
            is_repeated = is_same and time.monotonic() - self.since_seconds < _REPEATED_SECONDS
            self.is_urgent = self.is_urgent or not (is_for_peer or is_repeated)
            return False
        self.is_for_peer, self.since_seconds = is_for_peer, time.monotonic()
        self.signum = signum
        return True

    def is_requested(self) -> bool:
        """Whether a stop has been requested."""
        return bool(self.signum)

    def forward(self, signum: int) -> None:
        """Forward `signum` to every rank."""
        self.forwards.append(signum)
        if self.follower is not None:
            self.follower.forward(signum)

    def due(self, grace_seconds: float) -> int:
        """The signal that running ranks should have received by now; 0 for none.

        grace_seconds: the time after SIGTERM that the ranks requested to save a checkpoint; 0 for the default.
        """
        if not self.signum:
            return 0
        waited_seconds = time.monotonic() - self.since_seconds
        if self.is_urgent:
            return signal.SIGKILL
        if self.is_for_peer:
            is_late = waited_seconds > _PEER_SIGKILL_AFTER_SECONDS
            return signal.SIGKILL if is_late else self.signum
        if self.signum == signal.SIGTERM and grace_seconds:
            return signal.SIGKILL if waited_seconds > grace_seconds else self.signum
        if waited_seconds > _SIGKILL_AFTER_SECONDS:
            return signal.SIGKILL
        return signal.SIGTERM if waited_seconds > _SIGTERM_AFTER_SECONDS else self.signum


@contextlib.contextmanager
def stop_signals(*, logs_signal: bool = True) -> Iterator[Stop]:
    """A context in which signals to this process become requests. The first is logged on standard error."""
    stop = Stop()
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()  # its `put` is reentrant
    writer = threading.Thread(
        target=_write_messages, args=(messages,), name="xds-voice", daemon=True
    )

    def on_stop(signum: int, frame: FrameType | None) -> None:
        if stop.request(signum) and logs_signal:
            messages.put(f"\nxds: {signal.Signals(signum).name}: stopping every rank\n")

    def on_forward(signum: int, frame: FrameType | None) -> None:
        stop.forward(signum)

    writer.start()
    before = {}
    for handled, handler in ((STOPPING, on_stop), (FORWARDED, on_forward)):
        for signum in handled:
            # ignored under nohup, or for a job in the background
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, handler)
    try:
        yield stop
    finally:
        for signum, former in before.items():
            signal.signal(signum, former)
        messages.put("")
        writer.join(2 * PATIENCE_SECONDS)


def _write_messages(messages: queue.SimpleQueue[str]) -> None:
    while text := messages.get():
        write_stderr(text)
