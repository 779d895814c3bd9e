"""Writes to the streams of this process, whether anybody reads them or not.

A reader may be gone (EPIPE, EIO), or be there and take nothing (a full pipe, a stopped terminal). Neither may
stop what is to be done before a process ends, such as the save after a signal. So a thread writes, and the
caller waits for it only while there is time. No handler of a signal may call this: it can have
interrupted the start of a thread. A handler puts its words into a `queue.SimpleQueue`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import final

PATIENCE_SECONDS = 1.0  # with a reader that takes nothing, once there is a hurry
_TICK_SECONDS = 0.05


def write_whole(descriptor: int, data: bytes) -> None:
    """Write every byte of `data`."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # some other process made the terminal non-blocking
            select.select([], [descriptor], [])


def always() -> bool:
    """There is a hurry from the start."""
    return True


def never() -> bool:
    """A reader may take all the time it wants."""
    return False


def say(text: str, is_hurried: Callable[[], bool] = always) -> None:
    """Write `text` to standard error; never fails.

    A reader that takes nothing is waited for until there `is_hurried`, and then for a second.
    """
    thread = threading.Thread(target=_write_error, args=(text,), name="xds-message", daemon=True)
    thread.start()

    def has_ended(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    _patiently(has_ended, is_hurried)


def _write_error(text: str) -> None:
    stream = sys.stderr
    with contextlib.suppress(OSError, ValueError):  # nobody reads, or it is closed
        if stream is None:
            return
        try:
            descriptor = stream.fileno()
        except (OSError, AttributeError):  # replaced, by a notebook say
            stream.write(text)
        else:
            write_whole(descriptor, text.encode(errors="backslashreplace"))


def _patiently(has_ended: Callable[[float], bool], is_hurried: Callable[[], bool]) -> bool:
    """Wait for the end of something; False where it did not come in time."""
    hurried_since = 0.0
    while not has_ended(_TICK_SECONDS):
        now = time.monotonic()
        if is_hurried():
            hurried_since = hurried_since or now
            if now - hurried_since > PATIENCE_SECONDS:
                return False
    return True


@final
class Outlet:
    """Writes bytes to descriptors in order, each with a thread of its own.

    A reader that takes nothing holds the caller up, as a plain write would, until there `is_hurried`. A second
    later it is given up: what is still to come for it is dropped.
    """

    def __init__(self, is_hurried: Callable[[], bool]) -> None:
        self._is_hurried = is_hurried
        self._writers: dict[int, _Writer] = {}

    def write(self, descriptor: int, data: bytes) -> None:
        """Write every byte of `data`. An OSError says that nobody reads any more."""
        writer = self._writers.get(descriptor)
        if writer is None:
            writer = self._writers[descriptor] = _Writer(descriptor)
            writer.start()
        writer.write(data, self._is_hurried)

    def close(self) -> None:
        """End the threads; one that is still blocked goes with the process."""
        for writer in self._writers.values():
            writer.close()


@final
class _Writer(threading.Thread):
    def __init__(self, descriptor: int) -> None:
        super().__init__(name=f"xds-writer-{descriptor}", daemon=True)
        self._descriptor = descriptor
        self._work: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
        self._result: OSError | None = None
        self._is_given_up = False

    def run(self) -> None:
        while (data := self._work.get()) is not None:
            result = None
            try:
                write_whole(self._descriptor, data)
            except OSError as error:
                result = error
            self._results.put(result)

    def write(self, data: bytes, is_hurried: Callable[[], bool]) -> None:
        if self._is_given_up:
            return
        self._work.put(data)
        self._is_given_up = not _patiently(self._has_written, is_hurried)
        result, self._result = self._result, None
        if result is not None:
            raise result

    def _has_written(self, seconds: float) -> bool:
        try:
            self._result = self._results.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    def close(self) -> None:
        self._work.put(None)
