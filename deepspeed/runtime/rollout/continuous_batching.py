"""`deepspeed.runtime.rollout.continuous_batching`: which requests have a row of a batch that generates."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, final

from ...missing import placeholder


@final
@dataclass(frozen=True)
class ContinuousBatchRequest:
    """Something to generate."""

    request_id: Hashable


@final
@dataclass(frozen=True)
class ContinuousBatchUpdate:
    """A change of the rows: keep `keep_slots` of the old ones, in order, and append `admitted`.

    Attributes:
        active: the request of each row now.
        retired: ids of requests that have left.
    """

    active: tuple[ContinuousBatchRequest, ...]
    keep_slots: tuple[int, ...]
    retired: tuple[Hashable, ...]
    admitted: tuple[ContinuousBatchRequest, ...]

    @property
    def active_ids(self) -> tuple[Hashable, ...]:
        return tuple(one.request_id for one in self.active)

    @property
    def admitted_slots(self) -> tuple[int, ...]:
        """The rows of `admitted`."""
        return tuple(range(len(self.active)))[len(self.active) - len(self.admitted) :]


@final
class ContinuousBatchScheduler:
    """First come, first served.

    Args:
        max_batch_size: rows.
        max_new_tokens: tokens after which a request leaves; it may leave before.
    Raises:
        ValueError: a number below 1.
    """

    def __init__(self, max_batch_size: int, max_new_tokens: int) -> None:
        for name, value in (("max_batch_size", max_batch_size), ("max_new_tokens", max_new_tokens)):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be positive")
        self.max_batch_size = max_batch_size
        self.max_new_tokens = max_new_tokens
        self._waiting: deque[ContinuousBatchRequest] = deque()
        self._rows: dict[Hashable, ContinuousBatchRequest] = {}
        self._tokens: dict[Hashable, int] = {}

    @property
    def active(self) -> tuple[ContinuousBatchRequest, ...]:
        return tuple(self._rows.values())

    @property
    def pending(self) -> tuple[ContinuousBatchRequest, ...]:
        return tuple(self._waiting)

    def submit(self, request: ContinuousBatchRequest) -> None:
        """Let a request wait for a row.

        Raises:
            TypeError: it is none.
            ValueError: one with its id waits or has a row.
        """
        if not isinstance(request, ContinuousBatchRequest):
            raise TypeError(f"{type(request).__name__} is no ContinuousBatchRequest")
        if request.request_id in self._rows or request in self._waiting:
            raise ValueError(f"duplicate request_id {request.request_id!r}")
        self._waiting.append(request)

    def schedule(self, finished_ids: Iterable[Hashable] = ()) -> ContinuousBatchUpdate:
        """Take requests out, and fill free rows. Raises ValueError for an id without a row."""
        finished = self._checked(finished_ids)
        kept = [slot for slot, name in enumerate(self._rows) if name not in finished]
        retired = tuple(name for name in self._rows if name in finished)
        for name in retired:
            del self._rows[name], self._tokens[name]
        number = min(self.max_batch_size - len(self._rows), len(self._waiting))
        admitted = tuple(self._waiting.popleft() for _ in range(number))
        self._rows.update({one.request_id: one for one in admitted})
        self._tokens.update({one.request_id: 0 for one in admitted})
        return ContinuousBatchUpdate(self.active, tuple(kept), retired, admitted)

    def advance(self, finished_ids: Iterable[Hashable] = ()) -> ContinuousBatchUpdate:
        """Count one token for each row, then `schedule`. Raises ValueError for an id without a row."""
        finished = self._checked(finished_ids)
        self._tokens = {name: count + 1 for name, count in self._tokens.items()}
        done = {name for name, count in self._tokens.items() if count >= self.max_new_tokens}
        return self.schedule(finished | done)

    def _checked(self, names: Iterable[Hashable]) -> set[Hashable]:
        found = set(names)
        for name in found - self._rows.keys():
            raise ValueError(f"request {name!r} is not active")
        return found


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
