"""A thread that posts and waits for messages while the caller sleeps.

    caller    job ── sleeps ─────────────────────────── result
    thread         receive, send, wait for both

A rank's messages share locks with the thread of gloo, and the caller would sleep several times for each
message. It computes a lot, so on a busy machine the kernel lets it wait after each sleep. This thread computes
almost nothing, so the kernel resumes it soon, and the caller sleeps once.

It runs only while a caller sleeps. So the order of messages is that of the caller.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import final


@final
class LightThread:
    """Runs one job at a time. It starts with the first job and ends with the process."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._jobs: list[_Job] = []
        self._free, self._begin = threading.Lock(), threading.Lock()
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
            arguments = (self._begin, self._jobs)
            self._thread = threading.Thread(target=_serve, args=arguments, daemon=True)
            self._thread.name = "xds-messages"
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

    def _restart(self) -> None:
        self._pid = os.getpid()
        self._thread = None
        self._jobs = []
        self._free, self._begin = threading.Lock(), threading.Lock()
        self._begin.acquire()


_Job = tuple[Callable[[], None], list[BaseException], threading.Lock]


def _serve(begin: threading.Lock, jobs: list[_Job]) -> None:
    while True:
        begin.acquire()
        job, found, done = jobs.pop()
        try:
            job()
        except BaseException as error:
            found.append(error)
        done.release()
        del job, found, done  # they refer to tensors


light_thread = LightThread()

__all__ = ["LightThread", "light_thread"]
