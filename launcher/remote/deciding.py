"""The head's part of a run whose ranks go on when others fail: the decider, and the store of generations.

    node part  ── rank_ended, ranks_stopped ──> head: Decider ── fill, kill, finish ──> node part
    a closed or silent connection: the host is lost, with all its ranks

The store listens on the address at which all hosts reach the head. So neither it nor the decider is lost with a
host, whichever that is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from ...ops.watch.store import Store
from ...recovery.decider import Command, Decider, Place
from ...recovery.generations import Lighthouse
from ...utils.errors import UsageError
from ...utils.quoting import printable
from ..job import Host
from ..ranks.failure import Failure
from ..ranks.network import join_endpoint
from ..ranks.rendezvous_store import serve_at
from ..ranks.units import (
    LOOK_FOR_NEW_SECONDS,
    LOOK_SECONDS,
    Ended,
    Stopped,
    tell_decider,
)

HEARTBEAT_SECONDS = 1.5  # a host without messages for so long is lost


@final
class Deciding:
    """One start of all ranks. Hosts have the numbers of `hosts` here.

    endpoint: of the store.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        counts: Sequence[int],
        num_spares: int,
        endpoint: str,
        key: str,
        *,
        takes_over: bool = False,
    ) -> None:
        """
        Args:
            hosts: those with ranks first, then spare ones.
            counts: the ranks of the first of them.
            endpoint: the address at which they reach the head, and a port or 0.
            key: of the run.
            takes_over: the head before this one was killed, and hosts hold versions of its ranks.
        """
        self.endpoint, self._store = _served(endpoint)
        places, first = [], 0
        for number, host in enumerate(hosts):
            count = counts[number] if number < len(counts) else 0
            ranks = tuple(range(first, first + count))
            places.append(Place(host.name, ranks, len(host.slots), host.site))
            first += count
        lighthouse = Lighthouse(Store(self._store, "recovery", -1, key), first)
        self.decider = Decider(lighthouse, places, num_spares)
        if takes_over:
            self.decider.launcher_killed()
        self.is_finished = False  # the hosts know that all ranks have ended
        self._looked_seconds = time.monotonic()

    @property
    def tick_seconds(self) -> float:
        """Between two looks at what ranks have said."""
        return LOOK_FOR_NEW_SECONDS if self.decider.is_waiting else LOOK_SECONDS

    def take(self, host: int, message: Mapping[str, Any]) -> None:
        """A message of a host."""
        if message["kind"] == "rank_ended":
            why = printable(message["why"])
            event = Ended(message["rank"], message["attempt"], message["code"], why)
            tell_decider(self.decider, host, event)
        else:
            tell_decider(self.decider, host, Stopped(tuple(message["ranks"])))

    def look(self) -> list[Command]:
        """What is decided now."""
        before, self._looked_seconds = self._looked_seconds, time.monotonic()
        self.decider.look(self._looked_seconds - before)
        return self.decider.take_commands()

    def counted(self, failures: Sequence[Failure]) -> list[Failure]:
        """Those that ended the run. The run went on without the others."""
        places, host_of = self.decider.places, self.decider.host_of
        return [
            failure
            for failure in failures
            if failure.rank in self.decider.failed
            and failure.host == places[host_of[failure.rank]].name
        ]


def head_address(seen: Mapping[str, str], given: str) -> str:
    """The address at which all hosts reach this machine.

    seen: by host, the address from which its connection came. given: --master-addr, if any.
    Raises UsageError: they differ, or are not known.
    """
    if given:
        return given
    found = set(seen.values())
    if len(found) == 1 and "" not in found:
        return found.pop()
    said = ", ".join(f"{host} {printable(address or '?')}" for host, address in seen.items())
    raise UsageError(
        f"--recover: hosts see this machine at different addresses ({said}); set --master-addr to one of this "
        "machine that all of them reach"
    )


def _served(endpoint: str) -> tuple[str, Any]:
    """The store and its endpoint. Raises UsageError: the address is not one of this machine."""
    store = serve_at(endpoint)
    if store is None:
        raise UsageError(
            f"--recover: this machine cannot listen at {printable(endpoint)}, where its hosts would reach it; "
            "set --master-addr to an address of this machine, and --master-port to a free port"
        )
    return join_endpoint(store.host, store.port), store


__all__ = ["HEARTBEAT_SECONDS", "Deciding", "head_address"]
