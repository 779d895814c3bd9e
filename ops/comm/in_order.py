"""Threads that run jobs, each of which waits for messages and starts the next ones.

    start of a collective    job: inside is done ──> send across ──> all has arrived
    its wait                 waits for the job

So the second half of a collective starts while the caller computes. Jobs of one key run in the order of `add`,
as their messages have to; jobs of different keys run at once, so none holds up another.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import final


@final
class Job:
    """A function that runs in a thread. `error`: what it raised."""

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
        self._function = None  # it refers to tensors
        self._is_done.set()

    def join(self) -> None:
        """Return when it has run, in a job that follows it. Raises what it raised."""
        self._is_done.wait()
        if self.error is not None:
            raise self.error

    def wait(self, seconds: float) -> bool:
        """Return when it has run, or after so long: False."""
        return self._is_done.wait(seconds)


@final
class InOrder:
    """Runs jobs. Threads start when they are needed, and end with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = 0
        self._threads: _Threads

    def add(self, key: Hashable, function: Callable[[], None]) -> Job:
        """Run `function` in a thread, after all earlier ones of this key."""
        if self._pid != os.getpid():  # also in a forked process, which has no copy of the threads
            self._pid, self._threads = os.getpid(), _Threads(self._name)
        job = Job(function)
        self._threads.add(key, job)
        return job


class _Threads:
    """The threads of one process: one for each key that has jobs at the same time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._num_idle = 0
        self._later: dict[Hashable, deque[Job]] = {}  # by key that a thread has
        self._now: queue.SimpleQueue[tuple[Hashable, Job]] = queue.SimpleQueue()

    def add(self, key: Hashable, job: Job) -> None:
        with self._lock:
            if key in self._later:
                self._later[key].append(job)
                return
            self._later[key] = deque()
            is_short = self._num_idle == 0
            if not is_short:
                self._num_idle -= 1
        if is_short:
            threading.Thread(target=self._serve, daemon=True, name=self._name).start()
        self._now.put((key, job))

    def _serve(self) -> None:
        while True:
            key, job = self._now.get()
            following: Job | None = job
            while following is not None:
                following.run()
                following = self._after(key)
            del key, job, following

    def _after(self, key: Hashable) -> Job | None:
        """The next job of a key; None: there is none, and the thread is idle."""
        with self._lock:
            if self._later[key]:
                return self._later[key].popleft()
            del self._later[key]
            self._num_idle += 1
            return None


__all__ = ["InOrder", "Job"]
