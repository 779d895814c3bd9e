"""Requests of a disk file: what a caller waits for, and which of them have to wait for each other."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import final

from torch import Tensor

from ...utils.errors import XdsError


@final
class DiskRequest:
    """A read or write of one range of the file. Its blocks are served in any order."""

    def __init__(self, memory: Tensor, offset: int, *, is_write: bool) -> None:
        self.offset = offset
        self.end = offset + memory.numel()
        self.is_write = is_write
        self.error: XdsError | None = None
        self.is_finished = False
        self.blocks_left = 0
        self.num_blockers = 0  # unfinished requests that have to be served before this one
        self.dependents: list[DiskRequest] = []
        # A lock, not an Event: no Python code holds it, so garbage collection cannot interrupt that.
        self._running = threading.Lock()
        self._running.acquire()
        self._memory: Tensor | None = memory  # keeps the memory until the request is finished
        array = (ctypes.c_char * memory.numel()).from_address(memory.data_ptr())
        self.view = memoryview(array).cast("B")

    def conflicts_with(self, other: DiskRequest) -> bool:
        """Whether the two ranges overlap and one of the requests writes."""
        overlap = self.offset < other.end and other.offset < self.end
        return overlap and (self.is_write or other.is_write)

    @property
    def operation(self) -> str:
        """ "read" or "write"."""
        return "write" if self.is_write else "read"

    def join(self, poll_seconds: float, on_poll: Callable[[], None]) -> None:
        """Wait until it is finished. Calls `on_poll` every `poll_seconds`."""
        while not self.is_finished:
            if self._running.acquire(timeout=poll_seconds):
                self._running.release()
            else:
                on_poll()

    def finish(self) -> None:
        """Give up the memory and wake those who wait."""
        self.view.release()
        self._memory = None
        self.is_finished = True
        self._running.release()
