"""Tells machines that have no head of each other's failure, through the store in which their agents meet.

Each machine was started by itself (torchrun's way, Kubernetes). torch's agents restart together, but one that
gives up just leaves: ranks elsewhere would wait for its ranks until their timeout. So it says why first.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from datetime import timedelta
from typing import Any, final

from ..job import Rendezvous
from .network import split_endpoint
from .stop import Stop

_POLL_SECONDS = 1.0
_DELIVERY_SECONDS = 2.5  # for the others to read, before the store may end with this process
_CONNECT_SECONDS = 20.0
_ON_TCP_STORES = ("c10d", "static")


@final
class Peers(threading.Thread):
    """Listens for another machine's failure, and tells this one's."""

    def __init__(self, rendezvous: Rendezvous, stop: Stop) -> None:
        super().__init__(name="xds-peers", daemon=True)
        self.received: dict[
            str, Any
        ] = {}  # {"text": the report there, "exit_code": of its first failure}
        self._rendezvous, self._stop_asked = rendezvous, stop
        self._key = f"xds/{rendezvous.run_id}/failed"
        self._store: Any = None
        self._is_over = threading.Event()

    def run(self) -> None:
        if self._rendezvous.kind not in _ON_TCP_STORES:
            return
        try:
            self._listen()
        except Exception:  # the store is gone, with the machine that held it: its ranks will tell
            self._store = None

    def _listen(self) -> None:
        from torch._C._distributed_c10d import TCPStore

        host, port = split_endpoint(self._rendezvous.endpoint)
        while not self._is_over.wait(_POLL_SECONDS):
            if self._store is None:
                self._store = TCPStore(
                    host, port, is_master=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
                )
            elif self._store.check([self._key]):
                self.received = json.loads(self._store.get(self._key))
                self._stop_asked.request(signal.SIGTERM, is_for_peer=True)
                return

    def publish(self, text: str, exit_code: int) -> None:
        """Let the other machines know how it ended here, and give them time to read it."""
        self._is_over.set()
        self.join(2 * _POLL_SECONDS)
        if self._store is None or self.received:
            return
        try:
            self._store.set(self._key, json.dumps({"text": text, "exit_code": exit_code}))
        except Exception:
            return
        time.sleep(_DELIVERY_SECONDS)
