"""The methods of a torch.distributed store that xds uses, and a separate connection to a store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

REPLY_SECONDS = 5.0  # timeout for one answer of the store


class Store(Protocol):
    """The methods of a torch.distributed store that xds uses."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


def own_connection(store: Any) -> Any:
    """The same store through a separate connection: a client that waits for a key blocks all other calls.

    torch before 2.9 cannot clone a store; there the connection is shared.
    """
    clone = getattr(store, "clone", None)
    if clone is None:
        return store
    own = clone()
    own.set_timeout(timedelta(seconds=REPLY_SECONDS))
    return own
