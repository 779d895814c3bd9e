"""What every way of starting ranks on hosts shares: the orders, who was lost, and the one report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from ...utils.errors import UsageError
from ...utils.messages import OutputWriter
from ..job import Host, Job, Order, Remote, Rendezvous
from ..ranks.failure import Failure, Kind, first_failure, report, told_ranks
from ..ranks.stop import Stop
from .link import Write

HEARTBEAT_SECONDS = 6.0  # a silence that counts as the end of a host
_HOSTS_NAMED = 8


def heartbeat_seconds() -> float:
    """How long a silence between head and node may last: XDS_HEARTBEAT_SECONDS, or six seconds."""
    asked = os.environ.get("XDS_HEARTBEAT_SECONDS", "")
    try:
        seconds = float(asked) if asked else HEARTBEAT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0.5 <= seconds <= 3600:
        raise UsageError(
            f'XDS_HEARTBEAT_SECONDS = "{asked}": must be a number of seconds from 0.5 to 3600'
        )
    return seconds


@final
@dataclass
class Lost:
    """A host that does not take part any more: since when (wall clock, of its last sign), and why."""

    host: str
    why: str
    heard_at: float
    exit_code: int
    was_reached: bool
    ranks: tuple[int, ...] = ()  # that ran there


def own_streams(stop: Stop) -> Write:
    """Writes bytes of a node to this process's own stream; a reader that is gone does not matter."""
    output = OutputWriter(stop.was_asked)

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
    """The order of each host, in the order of their ranks."""
    orders = []
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
            )
        )
    return orders


def tell(
    failures: Sequence[Failure],
    finished: Sequence[int],
    errors: Mapping[str, str],
    lost: Sequence[Lost],
) -> tuple[str, int]:
    """The one report about a start, and the exit code of what failed first.

    A rank that failed by itself while all hosts were heard of comes first; then hosts that are lost; then
    what could not be started; then ranks that lost a peer.
    """
    first = first_failure(failures) if failures else None
    is_own = first is not None and first.kind is Kind.OWN
    if lost and not (is_own and first and first.time_seconds < min(each.heard_at for each in lost)):
        return _told_lost(lost), lost[0].exit_code
    if errors and not is_own:
        lines = [f"xds: {host}: {why}\n" for host, why in list(errors.items())[:_HOSTS_NAMED]]
        return "".join(lines), 2
    assert first is not None
    return report(failures, finished), first.exit_code


def _told_lost(lost: Sequence[Lost]) -> str:
    lines = []
    for each in lost[:_HOSTS_NAMED]:
        ranks = f" with {told_ranks(each.ranks)}" if each.ranks else ""
        how = f"was lost{ranks}" if each.was_reached else "cannot be reached"
        lines.append(f"xds: host {each.host} {how}: {each.why}\n")
    if len(lost) > _HOSTS_NAMED:
        lines.append(f"xds: and {len(lost) - _HOSTS_NAMED} more hosts\n")
    return "".join(lines)
