"""Which hosts take part in a start, with how many ranks each: plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from ..job import Host, Restarts


def choose_hosts(
    reachable: Sequence[Host], num_all: int, restarts: Restarts
) -> list[tuple[Host, int]]:
    """(host, ranks on it) for the next start; empty where too few hosts live or no number of ranks fits.

    Args:
        living: hosts that answer, in the order of the hostfile; num_all: how many there are in all.

    The most ranks that fit are taken, from the first hosts on.

    >>> a, b = Host("a", (0, 1)), Host("b", (0, 1))
    >>> [(host.name, ranks) for host, ranks in choose([a, b], 2, Restarts(fits=lambda n: n == 3))]
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
