"""What asks the ranks of this machine to stop, when, and how long they may take for it.

A handler does nothing that can block or fail: what it has to tell is written by a thread.
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
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)  # Slurm's --signal, stack dumps: the script's business

# A signal to the launcher: the same one to the ranks, then harder ones; all of it within 5 s.
_SIGTERM_AFTER_SECONDS = 1.5
_SIGKILL_AFTER_SECONDS = 3.5
# A rank elsewhere failed: there is nothing left to wait for.
_PEER_SIGKILL_AFTER_SECONDS = 3.0


@final
class Stop:
    """The first request to stop, and signals that only pass through. Written by handlers and threads.

    signum: what was asked for, 0 for nothing yet.
    is_for_peer: not the user asks: a rank on another host has failed.
    follower: is asked the same.
    """

    def __init__(self, follower: Stop | None = None) -> None:
        self.follower = follower
        self.signum = 0
        self.since_seconds = 0.0
        self.is_urgent = False  # asked twice
        self.is_for_peer = False
        self.forwards: list[int] = []

    def ask(self, signum: int, *, is_for_peer: bool = False) -> bool:
        """Stop with `signum`; a second time: at once. True for the first one."""
        if self.follower is not None:
            self.follower.ask(signum, is_for_peer=is_for_peer)
        if self.signum:
            self.is_urgent = self.is_urgent or not is_for_peer
            return False
        self.is_for_peer, self.since_seconds = is_for_peer, time.monotonic()
        self.signum = signum
        return True

    def was_asked(self) -> bool:
        """Whether anybody has asked yet."""
        return bool(self.signum)

    def forward(self, signum: int) -> None:
        """Let `signum` through to every rank."""
        self.forwards.append(signum)
        if self.follower is not None:
            self.follower.forward(signum)

    def due(self, grace_seconds: float) -> int:
        """The signal that living ranks should have had by now, 0 for none.

        grace_seconds: how long the ranks asked to be given after SIGTERM, to save; 0 for the usual.
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
def stop_signals(*, says_so: bool = True) -> Iterator[Stop]:
    """Signals to this process become requests, until the context ends; the first is told on standard error."""
    stop = Stop()
    words: queue.SimpleQueue[str] = queue.SimpleQueue()  # its `put` may interrupt itself
    voice = threading.Thread(target=_say_all, args=(words,), name="xds-voice", daemon=True)

    def asked(signum: int, frame: FrameType | None) -> None:
        if stop.ask(signum) and says_so:
            words.put(f"\nxds: {signal.Signals(signum).name}: stopping every rank\n")

    def passed(signum: int, frame: FrameType | None) -> None:
        stop.forward(signum)

    voice.start()
    before = {}
    for handled, handler in ((STOPPING, asked), (FORWARDED, passed)):
        for signum in handled:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, or a job in the background
                before[signum] = signal.signal(signum, handler)
    try:
        yield stop
    finally:
        for signum, former in before.items():
            signal.signal(signum, former)
        words.put("")
        voice.join(2 * PATIENCE_SECONDS)


def _say_all(words: queue.SimpleQueue[str]) -> None:
    while text := words.get():
        write_stderr(text)
