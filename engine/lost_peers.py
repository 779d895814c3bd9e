"""Ends the waits of a rank for one that the launcher has lost: while groups are opened, and in collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist

from ..ops.comm.mesh_groups import MeshGroups
from ..ops.watch.store import REPLY_SECONDS
from ..recovery.generations import POLL_SECONDS, Generation, Meeting
from .process.process import timeout_seconds

_LOOK_SECONDS = 0.2


@final
class FencedStore(dist.Store):  # type: ignore[name-defined,misc]
    """The store of the groups of a generation. A wait in it fails as soon as a newer generation is there.

    So ranks that open groups do not wait for one that has failed meanwhile. The timeout of the group, which is
    short, is not that of a wait: see `CONNECT_SECONDS`.
    """

    def __init__(self, base: Any, meeting: Meeting, generation: Generation) -> None:
        super().__init__()
        self._base, self._meeting, self._generation = base, meeting, generation

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = timeout_seconds()
        deadline = time.monotonic() + seconds
        while not self._base.check(keys):
            if self._meeting.is_replaced(self._generation):
                raise RuntimeError("a newer generation has replaced it")
            if time.monotonic() > deadline:
                raise RuntimeError(f"another rank was not there within {seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def get(self, key: str) -> bytes:
        self.wait([key])
        found: bytes = self._base.get(key)
        return found

    def set(self, key: str, value: Any) -> None:
        self._base.set(key, value)

    def add(self, key: str, value: int) -> int:
        return int(self._base.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._base.check(keys))

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        found: bytes = self._base.compare_set(key, expected_value, desired_value)
        return found

    def delete_key(self, key: str) -> bool:
        return bool(self._base.delete_key(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def num_keys(self) -> int:
        return int(self._base.num_keys())

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> Any:
        """A connection for another thread, which nothing interrupts."""
        return self._base.clone()


@final
class Losses(threading.Thread):
    """Fails the waits of this rank when the launcher has lost a host that does not answer.

    A process that ends closes its connections. A host whose link is cut does not, and gloo would wait for it.
    """

    def __init__(self, meeting: Meeting, groups: MeshGroups) -> None:
        """meeting: over a connection that nothing else uses."""
        super().__init__(name="xds-losses", daemon=True)
        self._meeting, self._groups = meeting, groups
        self._generation: Generation | None = None  # whose groups are open
        self._is_open = threading.Lock()  # while nobody opens groups
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            generation = self._generation
            try:
                if generation is None or not self._meeting.has_lost(generation):
                    continue
            except RuntimeError:  # the launcher has ended
                return
            with self._is_open:
                if self._generation is generation:
                    self._generation = None
                    for opened in self._groups.opened:
                        opened.leave()

    @contextmanager
    def opening(self, generation: Generation) -> Iterator[None]:
        """Groups of `generation` are opened inside."""
        with self._is_open:
            yield
            self._generation = generation

    def end(self) -> None:
        self._is_over.set()
        if self.is_alive():
            self.join(REPLY_SECONDS)


__all__ = ["FencedStore", "Losses"]
