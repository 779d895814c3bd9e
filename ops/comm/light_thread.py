"""A thread that posts and waits for messages while the caller sleeps.

    caller    job ── sleeps ─────────────────────────── result
    thread         receive, send, wait for both

A rank's messages share locks with the thread of gloo, and the caller would sleep several times for each
message. It computes a lot, so on a busy machine the kernel lets it wait after each sleep. This thread computes
almost nothing, so the kernel resumes it soon, and the caller sleeps once.

It runs only while a caller sleeps. So the order of messages is that of the caller. It ends with the process
groups, at most `IDLE_SECONDS` later.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import final

import torch.distributed as dist

IDLE_SECONDS = 1.0  # after so long without a job the thread looks whether there are still groups


@final
class LightThread:
    """Runs one job at a time. Its thread starts with the first job."""

    def __init__(self) -> None:
        self._thread: _Thread | None
        self._jobs: list[_Job]
        self._restart()

    def run(self, job: Callable[[], None]) -> None:
        """Run `job` and return when it has ended; what it raises is raised here.

        While another caller has the thread, the job runs in the calling thread: neither waits for the other.
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
        found: list[BaseException] = []
        self._jobs.append((job, found, done))
        self._begin.release()
        try:
            done.acquire()
        except (
            BaseException
        ):  # a signal: the thread is still in the job, so the next job gets another one
            self._restart()
            raise
        return found[0] if found else None

    def needs(self, thread: _Thread) -> bool:
        """`thread`, which is idle, may get another job."""
        return self._thread is thread and dist.is_initialized()

    def leave(self, thread: _Thread) -> bool:
        """Whether `thread`, which is idle, may end: the next job starts another one."""
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
        """What the next thread gets."""
        self._jobs, self._begin = [], threading.Lock()
        self._begin.acquire()


_Job = tuple[Callable[[], None], list[BaseException], threading.Lock]


@final
class _Thread(threading.Thread):
    def __init__(self, owner: LightThread, begin: threading.Lock, jobs: list[_Job]) -> None:
        super().__init__(name="xds-messages", daemon=True)
        self._owner, self._begin, self._jobs = owner, begin, jobs

    def run(self) -> None:
        while True:
            if self._begin.acquire(timeout=IDLE_SECONDS) and self._jobs:
                self._serve()
            elif not self._owner.needs(self) and self._owner.leave(self):
                return

    def _serve(self) -> None:
        job, found, done = self._jobs.pop()
        try:
            job()
        except BaseException as error:
            found.append(error)
        del job  # it refers to tensors
        done.release()

    def stop(self) -> None:
        """End the thread now if it is idle, for programs that end the daemon threads that are left."""
        if self._owner.leave(self) and self._begin.locked():
            self._begin.release()
        self.join(IDLE_SECONDS)


light_thread = LightThread()  # one, so that there are few threads: it keeps nothing of a job

__all__ = ["LightThread", "light_thread"]
