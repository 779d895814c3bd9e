"""Threads that send and receive messages for a rank.

    LightThread      caller   job ── sleeps ──────────────────────── result
                     thread        receive, send, wait for both

    OrderedThreads   caller   add ── computes ─────────────── wait
                     thread        wait for messages, send the next ones

A rank's messages share locks with gloo's thread, so a caller that sends them itself sleeps several times for
each message. A rank computes a lot, so a busy kernel resumes it late after each sleep. A thread that computes
almost nothing is resumed soon.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import final

import torch.distributed as dist

IDLE_SECONDS = 1.0  # after so long without a job the thread looks whether there are still groups


@final
class LightThread:
    """Runs one job at a time while the caller sleeps, so the order of messages is that of the caller.

    The thread starts with the first job. It ends with the process groups, at most `IDLE_SECONDS` later.
    """

    def __init__(self) -> None:
        self._thread: _Thread | None
        self._jobs: list[_LightJob]
        self._restart()

    def run(self, job: Callable[[], None]) -> None:
        """Run `job`, and return when it has ended. An error of the job is raised here.

        The job runs in the calling thread while another caller uses the thread.
        """
        if self._pid != os.getpid():  # a forked process has no copy of the thread
            self._restart()
        if not self._free.acquire(blocking=False):
            job()
            return
        free = self._free
        try:
            error = self._run(job)
        finally:
            free.release()
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> BaseException | None:
        if self._thread is None:
            self._thread = _Thread(self, self._begin, self._jobs)
            self._thread.start()
        done = threading.Lock()
        done.acquire()
        errors: list[BaseException] = []
        self._jobs.append((job, errors, done))
        self._begin.release()
        try:
            done.acquire()
        # a signal: the thread is still in the job, the next job gets another one
        except BaseException:
            self._restart()
            raise
        return errors[0] if errors else None

    def needs(self, thread: _Thread) -> bool:
        """Whether the idle `thread` may get another job."""
        return self._thread is thread and dist.is_initialized()

    def remove(self, thread: _Thread) -> bool:
        """Whether the idle `thread` may end. The next job then starts another thread."""
        free = self._free
        if self._thread is thread:
            if not free.acquire(blocking=False):
                return False
            self._thread = None
            self._renew()
            free.release()
        return True

    def _restart(self) -> None:
        self._pid = os.getpid()
        self._thread = None
        self._free = threading.Lock()
        self._renew()

    def _renew(self) -> None:
        """Make the lock and the list that the next thread uses."""
        self._jobs, self._begin = [], threading.Lock()
        self._begin.acquire()


_LightJob = tuple[Callable[[], None], list[BaseException], threading.Lock]


@final
class _Thread(threading.Thread):
    def __init__(self, owner: LightThread, begin: threading.Lock, jobs: list[_LightJob]) -> None:
        super().__init__(name="xds-messages", daemon=True)
        self._owner, self._begin, self._jobs = owner, begin, jobs

    def run(self) -> None:
        while True:
            if self._begin.acquire(timeout=IDLE_SECONDS) and self._jobs:
                self._serve()
            elif not self._owner.needs(self) and self._owner.remove(self):
                return

    def _serve(self) -> None:
        job, errors, done = self._jobs.pop()
        try:
            job()
        except BaseException as error:
            errors.append(error)
        del job  # it refers to tensors
        done.release()

    def stop(self) -> None:
        """End the thread now if it is idle. Programs call this that end all remaining daemon threads."""
        if self._owner.remove(self) and self._begin.locked():
            self._begin.release()
        self.join(IDLE_SECONDS)


light_thread = LightThread()  # one for all groups of the process; it keeps nothing of a job


@final
class ThreadJob:
    """A function that runs in a thread. `error` is what it has raised."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._function: Callable[[], None] | None = function
        self._is_done = threading.Event()

    def run(self) -> None:
        """Run the function. The thread calls this."""
        assert self._function is not None
        try:
            self._function()
        except BaseException as error:
            self.error = error
        self._function = None  # it refers to tensors
        self._is_done.set()

    def join(self) -> None:
        """Wait until it has run, and raise its error. A later job may call this."""
        self._is_done.wait()
        if self.error is not None:
            raise self.error

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds` at most. Returns whether it has run."""
        return self._is_done.wait(seconds)


@final
class OrderedThreads:
    """Runs jobs while the caller computes. Jobs with equal keys run one after another, in the order of `add`.

    Jobs with different keys run at the same time, so none of them holds up another one. Threads start when they
    are needed, and end with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = 0
        self._threads: _Threads

    def add(self, key: Hashable, function: Callable[[], None]) -> ThreadJob:
        """Run `function` in a thread, after all earlier jobs with this key."""
        if self._pid != os.getpid():  # also in a forked process, which has no copy of the threads
            self._pid, self._threads = os.getpid(), _Threads(self._name)
        job = ThreadJob(function)
        self._threads.add(key, job)
        return job


class _Threads:
    """The threads of one process: one thread for each key that has jobs now."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._num_idle = 0
        # the waiting jobs of each key that a thread serves
        self._later: dict[Hashable, deque[ThreadJob]] = {}
        self._now: queue.SimpleQueue[tuple[Hashable, ThreadJob]] = queue.SimpleQueue()

    def add(self, key: Hashable, job: ThreadJob) -> None:
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
            following: ThreadJob | None = job
            while following is not None:
                following.run()
                following = self._after(key)
            del key, job, following

    def _after(self, key: Hashable) -> ThreadJob | None:
        """The next job of a key. None means that the thread is idle now."""
        with self._lock:
            if self._later[key]:
                return self._later[key].popleft()
            del self._later[key]
            self._num_idle += 1
            return None


__all__ = ["ThreadJob", "LightThread", "OrderedThreads", "light_thread"]
