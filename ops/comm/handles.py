"""Handles of collectives in flight: the work to wait for, and the processing of the received data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

from ..watch import Mark, Watch


class Handle(ABC):
    """A collective in flight. `wait` completes it and may be called more than once."""

    @abstractmethod
    def wait(self) -> None: ...


@final
class Done(Handle):
    """Nothing was sent."""

    def wait(self) -> None:
        return


@final
class Then(Handle):
    """Another handle, and a function to call once after it."""

    def __init__(self, handle: Handle, finish: Callable[[], None], kept: object = None) -> None:
        """kept: memory that is being sent, which nobody else holds."""
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
    """Works to wait for, each with its peer, and a function to call after them with the received data."""

    def __init__(
        self,
        watch: Watch,
        mark: Mark,
        works: Sequence[tuple[int | None, Any]],
        finish: Callable[[], None] | None = None,
        dropped: list[Any] | None = None,
    ) -> None:
        """dropped: gets works that nobody has waited for, where the backend does not keep them itself."""
        self._watch = watch
        self._mark = mark
        self._works = works
        self._finish = finish
        self._dropped = dropped

    def __del__(self) -> None:
        if self._works and self._dropped is not None:
            self._dropped.append(self._works)

    def wait(self) -> None:
        timed, peer = self._mark.timed, None
        if timed is not None:
            timed.begin_wait()
        try:
            for peer, work in self._works:  # noqa: B007 (the message names it)
                begin_seconds = self._watch.begin_wait(self._mark)  # each has the whole timeout
                work.wait()
                self._watch.end_wait(self._mark, begin_seconds)
        except RuntimeError as error:
            self._works = ()  # the backend has closed the connections
            raise self._watch.failed(self._mark, error, peer) from error
        self._works = ()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        if timed is not None:
            timed.end()
