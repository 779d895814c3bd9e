"""Lanes: ordered queues of copies between a device and the host, and of work on host memory.

    device memory ──> to_host ──> host memory ──> updates ──> to_device ──> device memory

- The jobs of one lane run one after the other. Jobs of different lanes run at the same time.
- On a GPU a copy lane is a stream, and its jobs only enqueue copies; `updates` is a thread.
- On a CPU every lane is a thread: its copies are real, so the order of everything is the same as on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import torch

from .places import Mark, Ticket

IN_FLIGHT = (
    2  # device buffers that wait for their copy to the host: one is copied while one is filled
)


class Lane(ABC):
    """Runs jobs one after the other."""

    @abstractmethod
    def run(self, job: Callable[[], Any], after: Mark | None = None) -> Ticket:
        """Run `job` after all earlier jobs, and after the device's work that was started before `after`.

        after: default: now.
        """

    @abstractmethod
    def mark(self) -> Mark | None:
        """A mark behind the device's work that was started before."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all jobs, and end the lane. Jobs that raise are ignored."""


@final
class _ThreadTicket(Ticket):
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def order(self) -> None:
        self._future.result()

    @property
    def is_done(self) -> bool:
        return self._future.done()


@final
class ThreadLane(Lane):
    """A thread that runs the jobs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._pool = _one_thread(name)

    def run(self, job: Callable[[], Any], after: Mark | None = None) -> Ticket:
        return _ThreadTicket(self._pool.submit(_without_grad, job))

    def mark(self) -> Mark | None:
        return None

    def close(self) -> None:
        self._pool.shutdown()


def _one_thread(name: str) -> ThreadPoolExecutor:
    """A thread with this thread's number of threads and device: a new one would use defaults, and device 0."""
    num_threads = torch.get_num_threads()
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if has_cuda else None

    def begin() -> None:
        torch.set_num_threads(num_threads)
        if device is not None:
            torch.cuda.set_device(device)

    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=begin)


def _without_grad(job: Callable[[], Any]) -> None:
    with torch.no_grad():  # the mode belongs to a thread
        job()


@final
class _StreamTicket(Ticket):
    is_done = True

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


@final
class StreamLane(Lane):
    """A CUDA stream. Jobs enqueue copies; their memory must not be freed before the ticket is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark | None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def run(self, job: Callable[[], Any], after: Mark | None = None) -> Ticket:
        mark = self.mark() if after is None else after
        assert mark is not None
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream), torch.no_grad():
            job()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _StreamTicket(event)

    def close(self) -> None:
        self._stream.synchronize()


@final
class _LaunchedTicket(Ticket):
    def __init__(self, future: Future[Ticket]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result().wait()

    def order(self) -> None:
        self._future.result().order()

    @property
    def is_done(self) -> bool:
        return self._future.done()


@final
class LaunchedLane(Lane):
    """A stream whose jobs are enqueued by a thread: one may wait for work on the host first."""

    def __init__(self, stream: StreamLane) -> None:
        self._stream = stream
        self._pool = _one_thread("xds-launch")

    def mark(self) -> Mark | None:
        return self._stream.mark()

    def run(self, job: Callable[[], Any], after: Mark | None = None) -> Ticket:
        mark = self.mark() if after is None else after
        return _LaunchedTicket(self._pool.submit(self._stream.run, job, mark))

    def close(self) -> None:
        self._pool.shutdown()
        self._stream.close()


@final
class Lanes:
    """The lanes of one engine."""

    def __init__(self, to_host: Lane, to_device: Lane, updates: Lane) -> None:
        self.to_host = to_host
        self.to_device = to_device
        self.updates = updates

    @classmethod
    def of(cls, device: torch.device) -> Lanes:
        """The lanes for `device`."""
        if device.type == "cuda":
            launched = LaunchedLane(StreamLane(device))
            return cls(StreamLane(device), launched, ThreadLane("xds-update"))
        return cls.of_copies(device)

    @classmethod
    def of_copies(cls, device: torch.device) -> Lanes:
        """The lanes for `device` where no copy waits for work on the host, so no thread has to start them."""
        if device.type == "cuda":
            return cls(StreamLane(device), StreamLane(device), ThreadLane("xds-update"))
        return cls(ThreadLane("xds-to-host"), ThreadLane("xds-to-device"), ThreadLane("xds-update"))

    def close(self) -> None:
        """End all lanes."""
        for lane in (self.updates, self.to_host, self.to_device):
            lane.close()


@final
class Outbox:
    """Device buffers that are being copied to the host, each given back after its copy; at most `IN_FLIGHT`."""

    def __init__(self) -> None:
        self._leaving: deque[tuple[Ticket, Callable[[], None]]] = deque()

    def add(self, ticket: Ticket, give_back: Callable[[], None]) -> None:
        """Call `give_back` after `ticket`. Waits for the oldest copy if there are too many."""
        self._leaving.append((ticket, give_back))
        while len(self._leaving) > IN_FLIGHT:
            self._end_oldest()

    def drain(self) -> None:
        """Give back all buffers."""
        while self._leaving:
            self._end_oldest()

    def _end_oldest(self) -> None:
        ticket, give_back = self._leaving.popleft()
        ticket.order()
        give_back()


__all__ = [
    "Lane",
    "Lanes",
    "Outbox",
    "StreamLane",
    "ThreadLane",
]
