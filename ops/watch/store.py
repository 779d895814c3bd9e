"""Messages between the ranks of a run, in the store of their group.

The store (torch's TCPStore) has no authentication: whoever reaches its port can read, write and delete. So each
message is sealed with the run's key, which the launcher creates and passes to the ranks in XDS_RUN_KEY. What no
process of the run has written is ignored, with one warning. So is what is older than what was read before under
the same name. Without a key (`torchrun`, `python train.py`) messages are plain text.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any, TypeVar, final

from pydantic import TypeAdapter, ValidationError

from ...utils.sealing import RUN_KEY, seal, unseal

log = logging.getLogger("xds")
REPLY_SECONDS = 5.0  # timeout for one answer of the store
_ABSENT = "?"  # no message is this text
Kind = TypeVar("Kind")


@final
class Store:
    """The messages of one group. Every method may raise RuntimeError: the store is not reachable."""

    def __init__(self, store: Any, group: str, rank: int, key: str | None = None) -> None:
        """
        Args:
            store: of torch.distributed.
            group: its name; messages of one group are not accepted in another.
            rank: the writer of this process's messages.
            key: of the run; None: the one in the environment.
        """
        self._store, self._group, self._rank = store, group, rank
        self._key = os.environ.get(RUN_KEY, "") if key is None else key
        # by name and writer: the time at which the newest message that was read was written
        self._newest: dict[tuple[str, str], int] = {}

    def own_connection(self) -> Store:
        """The same store through a separate connection: a client that waits blocks all other calls.

        torch before 2.9 cannot clone a store; there the connection is shared.
        """
        clone = getattr(self._store, "clone", None)
        if clone is None:
            return self
        own = clone()
        own.set_timeout(timedelta(seconds=REPLY_SECONDS))
        return Store(own, self._group, self._rank, self._key)

    def set(self, name: str, text: str) -> None:
        """Write a message, in place of an earlier one of this name."""
        self._store.set(name, self._sealed(name, text))

    def set_first(self, name: str, text: str) -> None:
        """Write a message, unless there is one of this name. Of several writers one is the first."""
        self._store.compare_set(name, "", self._sealed(name, text))

    def has_all(self, names: list[str]) -> bool:
        """There are messages of all these names, valid or not."""
        return bool(self._store.check(names))

    def read(self, name: str) -> str | None:
        """The message; None where there is none, or one that is not valid. Does not wait."""
        # changes nothing; `get` would wait for a message that somebody deletes
        value: bytes = self._store.compare_set(name, _ABSENT, _ABSENT)
        return None if value == _ABSENT.encode() else self._opened(name, value)

    def read_as(self, kind: TypeAdapter[Kind], name: str) -> Kind | None:
        """The message, which is JSON, as an object of `kind`; None as in `read`."""
        return _parsed(kind, self.read(name))

    def read_all_as(self, kind: TypeAdapter[Kind], names: list[str]) -> list[Kind]:
        """All of these messages, in two round trips; [] where one is missing or not valid."""
        from torch.distributed import DistStoreError

        if not self._store.check(names):
            return []
        try:
            values: list[bytes] = self._store.multi_get(names)
        except DistStoreError:  # it waited: somebody has deleted one
            return []
        texts = [self._opened(name, value) for name, value in zip(names, values, strict=True)]
        found = [_parsed(kind, text) for text in texts]
        return [each for each in found if each is not None] if None not in found else []

    def delete(self, name: str) -> None:
        self._store.delete_key(name)

    def _sealed(self, name: str, text: str) -> str:
        if not self._key:
            return text
        return seal(self._key, self._full(name), f"{self._rank} {time.monotonic_ns()} {text}")

    def _full(self, name: str) -> str:
        return f"{self._group} {name}"

    def _opened(self, name: str, value: bytes) -> str | None:
        """The text of a message; None: nobody of this run wrote it, or it is an old one."""
        try:
            if not self._key:
                return value.decode()
            writer, written, text = unseal(self._key, self._full(name), value).split(" ", 2)
            if int(written) >= self._newest.get((name, writer), 0):
                self._newest[name, writer] = int(written)
                return text
        except ValueError:
            pass
        _warn()
        return None


def serve_store(address: str = "", listening: socket.socket | None = None) -> Any:
    """A TCPStore of this process that listens on one address only; torch's own listens on every interface.

    listening: a socket that is bound and listens already, instead of one at any port of `address`.
    Raises OSError: the address is not one of this machine.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if listening is None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family)
    host, port = listening.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


def _parsed(kind: TypeAdapter[Kind], text: str | None) -> Kind | None:
    try:
        return None if text is None else kind.validate_json(text)
    except ValidationError:
        _warn()
        return None


# taken by the first of the threads that read, and kept: all engines of a process use the store of the run
_first_warning = threading.Lock()


def _warn() -> None:
    if _first_warning.acquire(blocking=False):
        log.warning(
            "xds: a message in the store of this run is ignored, because no process of the run has written it. "
            "Another user may have; docs/launching.md, Security, says what others can do"
        )


__all__ = ["REPLY_SECONDS", "Store", "serve_store"]
