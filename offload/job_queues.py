"""Ordered queues of copies between a device and the host, and of work on host memory.

    device memory ──> to_host ──> host memory ──> updates ──> to_device ──> device memory

- The jobs of one queue run one after the other. Jobs of different queues run at the same time.
- On a device with streams a queue of copies is one, and its jobs only enqueue copies; `updates` is a thread.
- Elsewhere every queue is a thread: its copies are real, so the order of everything is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import torch

from ..ops.device import device_of, present
from .interfaces import JobHandle, Mark

IN_FLIGHT = (
    2  # device buffers that wait for their copy to the host: one is copied while one is filled
)


class JobQueue(ABC):
    """Runs jobs one after the other."""

    @abstractmethod
    def run(self, job: Callable[[], Any], after: Mark | None = None) -> JobHandle:
        """Run `job` after all earlier jobs, and after the device's work that was started before `after`.

        after: default: now.
        """

    @abstractmethod
    def mark(self) -> Mark | None:
        """A mark behind the device's work that was started before."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all jobs, and end the queue. Jobs that raise are ignored."""


@final
class _ThreadHandle(JobHandle):
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def wait_on_device(self) -> None:
        self._future.result()

    @property
    def is_done(self) -> bool:
        return self._future.done()


@final
class ThreadQueue(JobQueue):
    """A thread that runs the jobs. copies_of: a device without streams, whose copies the jobs start."""

    def __init__(self, name: str, copies_of: torch.device | None = None) -> None:
        self.name = name
        self._pool = _one_thread(name)
        self._device = None if copies_of is None else device_of(copies_of)

    def run(self, job: Callable[[], Any], after: Mark | None = None) -> JobHandle:
        return _ThreadHandle(self._pool.submit(self._run, job))

    def _run(self, job: Callable[[], Any]) -> None:
        _without_grad(job)
        if self._device is not None:
            self._device.synchronize()

    def mark(self) -> Mark | None:
        return None

    def close(self) -> None:
        self._pool.shutdown()


def _one_thread(name: str) -> ThreadPoolExecutor:
    """A thread with this thread's number of threads and device: a new one would use defaults, and device 0."""
    num_threads = torch.get_num_threads()
    device = present()

    def begin() -> None:
        torch.set_num_threads(num_threads)
        device.make_current()

    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=begin)


def _without_grad(job: Callable[[], Any]) -> None:
    with torch.no_grad():  # the mode belongs to a thread
        job()


@final
class _StreamHandle(JobHandle):
    is_done = True

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def wait_on_device(self) -> None:
        self._event.wait()


@final
class StreamQueue(JobQueue):
    """A stream. Jobs enqueue copies; their memory must not be freed before the handle is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._stream = torch.Stream(device)

    def mark(self) -> Mark | None:
        event: Mark = self._device.event()
        return event

    def run(self, job: Callable[[], Any], after: Mark | None = None) -> JobHandle:
        mark = self.mark() if after is None else after
        assert mark is not None
        self._stream.wait_event(mark)
        with self._stream, torch.no_grad():
            job()
        return _StreamHandle(self._stream.record_event())

    def close(self) -> None:
        self._stream.synchronize()


@final
class _LaunchedHandle(JobHandle):
    def __init__(self, future: Future[JobHandle]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result().wait()

    def wait_on_device(self) -> None:
        self._future.result().wait_on_device()

    @property
    def is_done(self) -> bool:
        return self._future.done()


@final
class LaunchedQueue(JobQueue):
    """A stream whose jobs are enqueued by a thread: one may wait for work on the host first."""

    def __init__(self, stream: StreamQueue) -> None:
        self._stream = stream
        self._pool = _one_thread("xds-launch")

    def mark(self) -> Mark | None:
        return self._stream.mark()

    def run(self, job: Callable[[], Any], after: Mark | None = None) -> JobHandle:
        mark = self.mark() if after is None else after
        return _LaunchedHandle(self._pool.submit(self._stream.run, job, mark))

    def close(self) -> None:
        self._pool.shutdown()
        self._stream.close()


@final
class JobQueues:
    """The queues of one engine."""

    def __init__(self, to_host: JobQueue, to_device: JobQueue, updates: JobQueue) -> None:
        self.to_host = to_host
        self.to_device = to_device
        self.updates = updates

    @classmethod
    def of(cls, device: torch.device) -> JobQueues:
        """The queues for `device`."""
        if device_of(device).has_streams:
            launched = LaunchedQueue(StreamQueue(device))
            return cls(StreamQueue(device), launched, ThreadQueue("xds-update"))
        return cls.of_copies(device)

    @classmethod
    def of_copies(cls, device: torch.device) -> JobQueues:
        """The queues for `device` where no copy waits for work on the host, so no thread has to start them."""
        if device_of(device).has_streams:
            return cls(StreamQueue(device), StreamQueue(device), ThreadQueue("xds-update"))
        to_host, to_device = (ThreadQueue(f"xds-to-{end}", device) for end in ("host", "device"))
        return cls(to_host, to_device, ThreadQueue("xds-update"))

    def close(self) -> None:
        """End all queues."""
        for queue in (self.updates, self.to_host, self.to_device):
            queue.close()


@final
class PendingCopies:
    """Device buffers that are being copied to the host, each given back after its copy; at most `IN_FLIGHT`."""

    def __init__(self) -> None:
        self._copies: deque[tuple[JobHandle, Callable[[], None]]] = deque()

    def add(self, handle: JobHandle, give_back: Callable[[], None]) -> None:
        """Call `give_back` after `handle`. Waits for the oldest copy if there are too many."""
        self._copies.append((handle, give_back))
        while len(self._copies) > IN_FLIGHT:
            self._end_oldest()

    def drain(self) -> None:
        """Give back all buffers."""
        while self._copies:
            self._end_oldest()

    def _end_oldest(self) -> None:
        handle, give_back = self._copies.popleft()
        handle.wait_on_device()
        give_back()


__all__ = [
    "JobQueue",
    "JobQueues",
    "PendingCopies",
    "StreamQueue",
    "ThreadQueue",
]
