"""A thread that runs jobs in their order, each of which waits for messages and starts the next ones.

    start of a collective    job: inside is done ──> send across
    its wait                 waits for the job

So the second half of a collective starts while the caller computes. Jobs wait for what all ranks start in one
order, so none holds up another.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import final


@final
class Job:
    """A function that runs in the thread. `error`: what it raised."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._function: Callable[[], None] | None = function
        self._is_done = threading.Event()

    def run(self) -> None:
        """In the thread."""
        assert self._function is not None
        try:
            self._function()
        except BaseException as error:
            self.error = error
        self._function = None
        self._is_done.set()

    def wait(self, seconds: float) -> bool:
        """Return when it has run, or after so long: False."""
        return self._is_done.wait(seconds)


@final
class InOrder:
    """Runs jobs in the order of `add`. The thread starts with the first job and ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = 0
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def add(self, function: Callable[[], None]) -> Job:
        if self._pid != os.getpid():  # also in a forked process, which has no copy of the thread
            self._pid, self._jobs = os.getpid(), queue.SimpleQueue()
            threading.Thread(
                target=_serve, args=(self._jobs,), daemon=True, name=self._name
            ).start()
        job = Job(function)
        self._jobs.put(job)
        return job


def _serve(jobs: queue.SimpleQueue[Job]) -> None:
    while True:
        job = jobs.get()
        job.run()
        del job  # it refers to tensors


__all__ = ["InOrder", "Job"]
