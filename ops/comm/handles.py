"""Handles of operations in flight, and the error of an operation that cannot complete."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

from torch import Tensor

# the rank of the peer in the group, and a contiguous tensor
Messages = Sequence[tuple[int, Tensor]]
# the rank of the peer in the job, if there is one, and torch's work
Works = list[tuple[int | None, Any]]


@final
class Lost(RuntimeError):
    """A rank does not take part in an operation. Users get a `PeerError` in its place.

    rank: That rank's number in the job; None if it is not known.
    """

    def __init__(self, reason: str, rank: int | None) -> None:
        super().__init__(reason)
        self.rank = rank


class Handle(ABC):
    """An operation in flight. `wait` completes it, and may be called more than once.

    num_done: How many of its messages have arrived. The watcher gives each message the whole timeout.
    """

    num_done = 0

    @abstractmethod
    def wait(self) -> None:
        """Wait until the results are there and the inputs may be written. Raises `Lost` or `PeerError`."""


@final
class Done(Handle):
    """An operation that was complete when it returned."""

    def wait(self) -> None:
        return


@final
class Then(Handle):
    """Another handle, and a function that `wait` calls once after it."""

    def __init__(self, handle: Handle, finish: Callable[[], None], kept: object = None) -> None:
        """kept: Memory that is being sent, to which there is no other reference."""
        self._handle = handle
        self._finish: Callable[[], None] | None = finish
        self._kept = kept

    def wait(self) -> None:
        self._handle.wait()
        self._kept = None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


@final
class InFlight(Handle):
    """Works of torch, and a function that `wait` calls once after them."""

    def __init__(
        self,
        works: Sequence[tuple[int | None, Any]],
        finish: Callable[[], None] | None = None,
        dropped: list[Any] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """
        Args:
            dropped: Gets the works if nobody waits for them. None where the backend keeps them itself.
            timeout: Of each wait; None: that of the group.
        """
        self._works, self._timeout = works, timeout
        self._finish = finish
        self._dropped = dropped

    def __del__(self) -> None:
        if self._works and self._dropped is not None:
            self._dropped.append(self._works)

    def wait(self) -> None:
        for peer, work in self._works:
            try:
                if self._timeout is None:
                    work.wait()
                else:
                    work.wait(self._timeout)
            except RuntimeError as error:
                self._works = ()  # the backend has closed the connections
                raise Lost(str(error), peer) from error
            self.num_done += 1
        self._works = ()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


DONE = Done()

__all__ = ["DONE", "Done", "Handle", "InFlight", "Lost", "Messages", "Then", "Works"]
