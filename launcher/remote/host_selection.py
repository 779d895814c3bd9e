"""Chooses the hosts of a start and the number of ranks on each."""

from __future__ import annotations

from collections.abc import Sequence

from ..job import Host, Restarts


def choose_hosts(
    reachable: Sequence[Host], num_all: int, restarts: Restarts
) -> list[tuple[Host, int]]:
    """(host, number of ranks) for the next start; empty if there are too few hosts or no valid number of ranks.

    Args:
        reachable: hosts that answer, in the order of the hostfile.
        num_all: the number of all hosts.

    The largest valid number of ranks is chosen, and assigned to the first hosts.

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
