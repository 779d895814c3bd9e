"""Threads that serve the requests of one file, block by block, with system calls that release the GIL."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import final

from ...utils.errors import XdsError
from .failures import transfer_failed
from .options import ALIGN_BYTES, DiskOptions
from .requests import DiskRequest

log = logging.getLogger("xds")
MAX_STALLED = 3  # system calls in a row that transfer less than a page
EXIT_SECONDS = 10.0  # that the end of the process waits for blocks in flight
Block = tuple[DiskRequest, int, int]  # begin and end in the request's memory


@final
class DiskThreads:
    """`queue_depth` threads. The last one that ends closes the file.

    Threads refer to this object and never to the `DiskFile`, so that a file without references ends.
    """

    def __init__(self, fd: int, label: str, options: DiskOptions) -> None:
        self._fd = fd
        self._label = label
        self._options = options
        self._pid = os.getpid()
        self._blocks: SimpleQueue[Block | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._active: list[DiskRequest] = []  # in the order of submission
        self._is_abandoned = False
        self._has_warned = False
        # by thread: start, request, begin
        self._in_flight: dict[int, tuple[float, DiskRequest, int]] = {}
        self._num_alive = options.queue_depth
        self._threads = [
            threading.Thread(target=self._serve, name=f"xds-disk-{number}", daemon=True)
            for number in range(options.queue_depth)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: DiskRequest) -> None:
        """Serve `request` after all earlier ones with which it conflicts."""
        if request.offset == request.end:
            request.finish()
            return
        with self._lock:
            for other in self._active:
                if request.conflicts_with(other):
                    other.dependents.append(request)
                    request.num_blockers += 1
            self._active.append(request)
            is_ready = request.num_blockers == 0
        if is_ready:
            self._enqueue(request)

    def active(self) -> list[DiskRequest]:
        """The unfinished requests."""
        with self._lock:
            return list(self._active)

    def stop(self, join_seconds: float | None = EXIT_SECONDS) -> None:
        """Abandon what is not in flight, end the threads and close the file.

        Runs during garbage collection as well, in any thread: it takes no lock that a thread here holds.
        """
        if os.getpid() != self._pid:  # the threads are the parent's
            os.close(self._fd)
            return
        self._is_abandoned = True
        for _ in self._threads:
            self._blocks.put(None)
        if threading.current_thread() in self._threads:
            return
        deadline = None if join_seconds is None else time.monotonic() + join_seconds
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def warn_if_slow(self) -> None:
        """Warn, once for the file, if a block takes too long."""
        for start, request, begin in list(self._in_flight.values()):
            self._check_slow(start, request, begin)

    # -- the threads ------------------------------------------------------------------------------------

    def _enqueue(self, request: DiskRequest) -> None:
        blocks = list(_cut(request, self._options.block_bytes))
        request.blocks_left = len(blocks)
        for block in blocks:
            self._blocks.put(block)

    def _serve(self) -> None:
        while (block := self._blocks.get()) is not None:
            self._serve_block(*block)
            del block  # it would keep the request while this thread waits
        with self._lock:
            self._num_alive -= 1
            is_last = self._num_alive == 0
        if is_last:
            os.close(self._fd)

    def _serve_block(self, request: DiskRequest, begin: int, end: int) -> None:
        if request.error is None and not self._is_abandoned:
            error = self._transfer(request, begin, end)
            request.error = request.error or error
        with self._lock:
            request.blocks_left -= 1
            if request.blocks_left:
                return
            ready = self._release_dependents(request)
        for other in ready:
            self._enqueue(other)
        request.finish()

    def _transfer(self, request: DiskRequest, begin: int, end: int) -> XdsError | None:
        """The error of the block, or None. Raises nothing: a thread that ends early would stop the file."""
        me, start = threading.get_ident(), time.monotonic()
        self._in_flight[me] = start, request, begin
        try:
            _transfer(self._fd, request, begin, end)
        except OSError as error:
            return transfer_failed(
                error, request.operation, end - begin, request.offset + begin, self._label
            )
        except Exception as error:
            return XdsError(f"internal error: a {request.operation} of {self._label}: {error!r}")
        finally:
            del self._in_flight[me]
            self._check_slow(start, request, begin)
        return None

    def _release_dependents(self, request: DiskRequest) -> list[DiskRequest]:
        """Those of the requests behind a finished one that wait for no other."""
        self._active.remove(request)
        ready = []
        for other in request.dependents:
            other.num_blockers -= 1
            if request.is_write and request.error is not None and not other.is_write:
                other.error = request.error  # it would read old bytes
            if other.num_blockers == 0:
                ready.append(other)
        request.dependents.clear()
        return ready

    def _check_slow(self, start: float, request: DiskRequest, begin: int) -> None:
        seconds = time.monotonic() - start
        if seconds < self._options.slow_seconds or self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "xds: a %s at byte %d of %s has taken %.3g s so far; the disk is overloaded or failing: "
            "look at the kernel log (dmesg)",
            request.operation,
            request.offset + begin,
            self._label,
            seconds,
        )


def _cut(request: DiskRequest, block_bytes: int) -> Iterator[Block]:
    num_bytes = request.end - request.offset
    for begin in range(0, num_bytes, block_bytes):
        yield request, begin, min(begin + block_bytes, num_bytes)


def _transfer(fd: int, request: DiskRequest, begin: int, end: int) -> None:
    """Transfer the whole block. One system call may transfer only a part.

    Raises OSError: from the file system, or when nothing more is transferred.
    """
    call = os.pwritev if request.is_write else os.preadv
    stalled = 0
    while begin < end:
        count = call(fd, [request.view[begin:end]], request.offset + begin)
        begin += count - count % ALIGN_BYTES  # direct I/O continues at a page
        stalled = 0 if count >= ALIGN_BYTES else stalled + 1
        if stalled == MAX_STALLED:
            what = "the disk takes no more bytes" if request.is_write else "the file has ended"
            raise OSError(errno.EIO, what)
