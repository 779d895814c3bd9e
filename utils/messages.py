"""Writes to standard error and other descriptors without blocking forever on a reader.

The reader may be closed (EPIPE, EIO), or open but not reading (a full pipe, a stopped terminal). Neither may
delay the work before a process ends, such as the save after a signal. So a thread writes, and the caller
waits for it only as long as it has time. Signal handlers must not call these functions: a handler may have
interrupted the start of a thread. A handler puts its message into a `queue.SimpleQueue` instead.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, final

PATIENCE_SECONDS = 1.0  # how long an urgent write waits for a reader that does not read
_TICK_SECONDS = 0.05


def write_whole(descriptor: int, data: bytes) -> None:
    """Write every byte of `data`."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # another process made the terminal non-blocking
            select.select([], [descriptor], [])


def always() -> bool:
    """A write is urgent from the start."""
    return True


def never() -> bool:
    """A write is never urgent: wait for the reader without a limit."""
    return False


def write_stderr(text: str, is_urgent: Callable[[], bool] = always) -> None:
    """Write `text` to standard error. Never fails.

    Waits for a reader that does not read until `is_urgent` returns True, and then `PATIENCE_SECONDS` longer.
    """
    thread = threading.Thread(target=_write_error, args=(text,), name="xds-message", daemon=True)
    thread.start()

    def has_ended(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    _wait_until(has_ended, is_urgent)


def _write_error(text: str) -> None:
    stream = sys.stderr
    with contextlib.suppress(OSError, ValueError):  # the reader or the stream is closed
        if stream is None:
            return
        descriptor = _descriptor_of(stream)
        if descriptor is None:
            stream.write(text)
            stream.flush()
        else:
            write_whole(descriptor, text.encode(errors="backslashreplace"))


def _descriptor_of(stream: Any) -> int | None:
    """Where the text of `stream` goes; None: it is not a file.

    The stream of a notebook's cell has the descriptor of the kernel's terminal.
    """
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # of bytes in memory
            return stream.fileno()
    return None


def _wait_until(has_ended: Callable[[float], bool], is_urgent: Callable[[], bool]) -> bool:
    """Wait until `has_ended` returns True. Returns False where the time ran out first."""
    urgent_since = 0.0
    while not has_ended(_TICK_SECONDS):
        now = time.monotonic()
        if is_urgent():
            urgent_since = urgent_since or now
            if now - urgent_since > PATIENCE_SECONDS:
                return False
    return True


@final
class OutputWriter:
    """Writes bytes to descriptors in order, with one thread for each descriptor.

    A reader that does not read blocks the caller, as a plain write would, until `is_urgent` returns True.
    `PATIENCE_SECONDS` later the descriptor is abandoned: all further bytes for it are dropped.
    """

    def __init__(self, is_urgent: Callable[[], bool]) -> None:
        self._is_urgent = is_urgent
        self._writers: dict[int, _Writer] = {}

    def write(self, descriptor: int, data: bytes) -> None:
        """Write every byte of `data`. Raises OSError: the reader is closed."""
        writer = self._writers.get(descriptor)
        if writer is None:
            writer = self._writers[descriptor] = _Writer(descriptor)
            writer.start()
        writer.write(data, self._is_urgent)

    def close(self) -> None:
        """End the threads. A thread that is still blocked ends with the process."""
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
        self._is_abandoned = False

    def run(self) -> None:
        while (data := self._work.get()) is not None:
            result = None
            try:
                write_whole(self._descriptor, data)
            except OSError as error:
                result = error
            self._results.put(result)

    def write(self, data: bytes, is_urgent: Callable[[], bool]) -> None:
        if self._is_abandoned:
            return
        self._work.put(data)
        self._is_abandoned = not _wait_until(self._has_written, is_urgent)
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
