"""What is used of a torch.distributed store, and a connection to it that nobody else holds."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

REPLY_SECONDS = 5.0  # for one answer of the store


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


def own_connection(store: Any) -> Any:
    """The same store through a connection of its own: a client that waits for a key lets nobody else in.

    torch before 2.9 cannot; there the connection is shared.
    """
    clone = getattr(store, "clone", None)
    if clone is None:
        return store
    own = clone()
    own.set_timeout(timedelta(seconds=REPLY_SECONDS))
    return own
