"""Shared parts of head_per_host.py and head_at_once.py: hosts, orders, lost hosts, the final report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

from ...utils.errors import UsageError
from ...utils.messages import OutputWriter
from ...utils.quoting import ranks_text
from ..job import Host, Job, Order, Remote, Rendezvous, Restarts
from ..ranks.failure import Failure, Kind, first_failure, report
from ..ranks.stop import Stop
from .link import Write

if TYPE_CHECKING:
    from .holding import Held

HEARTBEAT_SECONDS = 6.0  # a host without messages for so long is lost
_MAX_HOSTS_NAMED = 8


def check_hosts(hosts: Sequence[Host], restarts: Restarts) -> None:
    """Raise a UsageError if no start is possible, even with all hosts."""
    hosts = [host for host in hosts if not host.is_spare]
    if not choose_hosts(hosts, len(hosts), restarts):
        raise UsageError(_unfit(hosts, restarts))


def _unfit(hosts: Sequence[Host], restarts: Restarts) -> str:
    ranks = sum(len(host.slots) for host in hosts)
    least = restarts.min_nodes or len(hosts)
    if len(hosts) < least:
        return f"{len(hosts)} host(s) are named, {least} are needed; name more, or lower --nnodes"
    return (
        f"no number of ranks up to {ranks} (all slots of {len(hosts)} hosts) is valid for the elasticity"
        " section of the config; `xds elastic config.json` prints the valid ones"
    )


def choose_hosts(
    reachable: Sequence[Host], num_all: int, restarts: Restarts
) -> list[tuple[Host, int]]:
    """(host, number of ranks) for the next start; empty if there are too few hosts or no valid number of ranks.

    Args:
        reachable: hosts that answer, in the order of the hostfile.
        num_all: the number of all hosts.

    The largest valid number of ranks is chosen, and assigned to the first hosts.

    >>> a, b = Host("a", (0, 1)), Host("b", (0, 1))
    >>> chosen = choose_hosts([a, b], 2, Restarts(fits=lambda n: n == 3))
    >>> [(host.name, ranks) for host, ranks in chosen]
    [('a', 2), ('b', 1)]
    """
    usable = list(reachable[: restarts.max_nodes or num_all])
    if len(usable) < (restarts.min_nodes or num_all):
        return []
    world_size = sum(len(host.slots) for host in usable)
    while world_size and restarts.fits is not None and not restarts.fits(world_size):
        world_size -= 1
    chosen = []
    for host in usable:
        ranks = min(len(host.slots), world_size)
        world_size -= ranks
        if ranks:
            chosen.append((host, ranks))
    return chosen if len(chosen) >= (restarts.min_nodes or 1) else []


def hosts_in_place(
    ready: Sequence[Host], every: Sequence[Host], held: Mapping[str, Held] | None = None
) -> list[tuple[Host, int]]:
    """(host, number of ranks) where spare hosts stand for those that are away; empty if there are too few.

    Args:
        ready: hosts that answer. every: of the hostfile, spare ones as well.
        held: by name of a host, whose versions it holds. Ranks stay where the newest are.

    >>> a, b, c = Host("a", (0, 1)), Host("b", (0,)), Host("c", (0, 1, 2), is_spare=True)
    >>> [(host.name, ranks) for host, ranks in hosts_in_place([b, c], [a, b, c])]
    [('c', 2), ('b', 1)]
    >>> held = {"a": {0: (0, 0), 1: (0, 0)}, "c": {0: (0, 3), 1: (0, 4)}}
    >>> [(host.name, ranks) for host, ranks in hosts_in_place([a, b, c], [a, b, c], held)]
    [('c', 2), ('b', 1)]
    """
    held, places = held or {}, [host for host in every if not host.is_spare]
    chosen: dict[int, Host] = {}
    first = 0
    for place, wanted in enumerate(places):
        holders = {
            held[host.name][first]: host for host in ready if first in held.get(host.name, {})
        }
        if holders:
            chosen[place] = holders[max(holders)]
        first += len(wanted.slots)
    free = [host for host in ready if host not in chosen.values()]
    for place, wanted in enumerate(places):
        if place in chosen:
            continue
        # those without a place of their own
        fits = [host for host in free if host.is_spare or places.index(host) in chosen]
        count, site = len(wanted.slots), wanted.site
        fits = [host for host in fits if len(host.slots) >= count and host.site == site]
        if wanted not in free and not fits:
            return []
        chosen[place] = wanted if wanted in free else fits[0]
        free.remove(chosen[place])
    return [(chosen[place], len(wanted.slots)) for place, wanted in enumerate(places)]


def heartbeat_seconds(default_seconds: float = HEARTBEAT_SECONDS) -> float:
    """The timeout for messages between head and node: XDS_HEARTBEAT_SECONDS, or the default."""
    text = os.environ.get("XDS_HEARTBEAT_SECONDS", "")
    try:
        seconds = float(text) if text else default_seconds
    except ValueError:
        seconds = 0.0
    if not 0.5 <= seconds <= 3600:
        raise UsageError(
            f'XDS_HEARTBEAT_SECONDS = "{text}": must be a number of seconds from 0.5 to 3600'
        )
    return seconds


@final
@dataclass
class LostHost:
    """A lost host: the time of its last message (wall clock), and the reason."""

    host: str
    why: str
    last_message_at: float
    exit_code: int
    was_reached: bool
    ranks: tuple[int, ...] = ()  # that ran there


@dataclass
class Results:
    """How the ranks of one start ended. errors: why hosts could not start their ranks, by host."""

    failures: list[Failure] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def add(self, host: str, message: Mapping[str, Any], ahead_seconds: float) -> None:
        """Add the message "ended" of `host`. ahead_seconds: its clock minus ours."""
        self.finished += message["finished"]
        for record in message["failures"]:
            failure = Failure.from_dict(record)
            at = failure.time_seconds - ahead_seconds
            self.failures.append(replace(failure, time_seconds=at, host=host))
        if message["error"]:
            self.errors[host] = message["error"]


def own_streams(stop: Stop) -> Write:
    """A function that writes bytes of a node to this process's own stream, and ignores a closed reader."""
    output = OutputWriter(stop.is_requested)

    def write(descriptor: int, data: bytes) -> None:
        with contextlib.suppress(OSError):
            output.write(descriptor, data)

    return write


def make_orders(
    job: Job,
    counts: Sequence[tuple[Host, int]],
    remote: Remote,
    rendezvous: Rendezvous,
) -> list[Order]:
    """The orders of all hosts, sorted by rank."""
    orders = []
    in_places = tuple(count for _, count in counts) if job.recovers else ()
    for number, (host, num_ranks) in enumerate(counts):
        meeting = replace(
            rendezvous, min_nodes=len(counts), max_nodes=len(counts), node_rank=number
        )
        orders.append(
            Order(
                job,
                meeting,
                num_ranks,
                devices=host.slots[:num_ranks] if remote.is_numbered else None,
                environment=dict(remote.environment),
                folder=remote.folder,
                host=host.name,
                counts=in_places,
            )
        )
    return orders


def spare_order(order: Order, host: Host) -> Order:
    """That of a host without ranks, which may take the place of another one. order: of any host."""
    return replace(
        order,
        rendezvous=replace(order.rendezvous, node_rank=None),
        num_ranks=len(host.slots),
        devices=None if order.devices is None else host.slots,
        host=host.name,
    )


def final_report(
    failures: Sequence[Failure],
    finished: Sequence[int],
    errors: Mapping[str, str],
    lost: Sequence[LostHost],
) -> tuple[str, int]:
    """The final report about a start, and the exit code of the first failure.

    A rank's own failure before the loss of any host takes precedence. Then lost hosts, then hosts that could
    not start their ranks, then ranks that lost a peer.
    """
    first = first_failure(failures) if failures else None
    is_own = first is not None and first.kind is Kind.OWN
    if lost and not (
        is_own and first and first.time_seconds < min(each.last_message_at for each in lost)
    ):
        return _lost_text(lost), lost[0].exit_code
    if errors and not is_own:
        lines = [f"xds: {host}: {why}\n" for host, why in list(errors.items())[:_MAX_HOSTS_NAMED]]
        return "".join(lines), 2
    assert first is not None
    return report(failures, finished), first.exit_code


def _lost_text(lost: Sequence[LostHost]) -> str:
    lines = []
    for each in lost[:_MAX_HOSTS_NAMED]:
        ranks = f" with {ranks_text(each.ranks)}" if each.ranks else ""
        how = f"was lost{ranks}" if each.was_reached else "cannot be reached"
        lines.append(f"xds: host {each.host} {how}: {each.why}\n")
    if len(lost) > _MAX_HOSTS_NAMED:
        lines.append(f"xds: and {len(lost) - _MAX_HOSTS_NAMED} more hosts\n")
    return "".join(lines)
