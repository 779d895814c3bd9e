"""Publishes a failure to the other machines through the rendezvous store, for runs without a head process.

Each machine starts xds itself (as with torchrun or Kubernetes). torch's agents restart together, but an agent
without restarts left exits silently. Ranks on other machines would then wait until their timeout. So the
failure is published before the agent exits.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, final

from ...utils.quoting import plain_lines
from ..job import Rendezvous
from .network import split_endpoint
from .stop import Stop

if TYPE_CHECKING:
    from ...ops.watch.store import Store

_POLL_SECONDS = 1.0
_DELIVERY_SECONDS = 2.5  # time for the others to read, before the store may end with this process
_CONNECT_SECONDS = 20.0
_ON_TCP_STORES = ("c10d", "static")


@final
@dataclass(frozen=True)
class Ending:
    """How the ranks of another machine ended. text: the report. exit_code: that of the first failure."""

    text: str
    exit_code: int


@final
class Peers(threading.Thread):
    """A thread that receives another machine's failure, and publishes that of this machine."""

    def __init__(self, rendezvous: Rendezvous, stop: Stop) -> None:
        super().__init__(name="xds-peers", daemon=True)
        self.received: Ending | None = None
        self._rendezvous, self._stop_asked = rendezvous, stop
        self._key = f"xds/{rendezvous.run_id}/failed"
        self._store: Store | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        if self._rendezvous.kind not in _ON_TCP_STORES:
            return
        try:
            self._listen()
        except Exception:  # the store ended with its machine; the ranks here fail on the lost peer
            self._store = None

    def _listen(self) -> None:
        from pydantic import TypeAdapter
        from torch._C._distributed_c10d import TCPStore

        from ...ops.watch.store import Store

        kind = TypeAdapter(Ending)
        host, port = split_endpoint(self._rendezvous.endpoint)
        while not self._is_over.wait(_POLL_SECONDS):
            if self._store is None:
                store = TCPStore(
                    host, port, is_master=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
                )
                self._store = Store(store, "launcher", self._rendezvous.node_rank or 0)
                continue
            found = self._store.read_as(kind, self._key)
            if found is not None:
                self.received = Ending(plain_lines(found.text), found.exit_code % 256 or 1)
                self._stop_asked.request(signal.SIGTERM, is_for_peer=True)
                return

    def publish(self, text: str, exit_code: int) -> None:
        """Publish how the ranks ended on this machine, and give the others time to read it."""
        self._is_over.set()
        self.join(2 * _POLL_SECONDS)
        if self._store is None or self.received:
            return
        try:
            self._store.set(self._key, json.dumps({"text": text, "exit_code": exit_code}))
        except Exception:
            return
        time.sleep(_DELIVERY_SECONDS)
