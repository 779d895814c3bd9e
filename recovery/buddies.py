"""Who keeps a second copy of a rank's states: a rank of the next host. Pure arithmetic.

    host 0       host 1       host 2          a ring of hosts, in the order of their numbers; the rank with the
    0 ────────>  2 ────────>  4 ──> 0         same place keeps the copy. Where the next host has fewer ranks
    1 ────────>  3 ────────>  5 ──> 1         they take turns

So any one host can be lost with all of its ranks, or several hosts of which no two are neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .slots import NONE

Held = Mapping[
    int, Sequence[int]
]  # by rank of another host: the steps of its versions in this memory


def ranks_by_host(hosts: Sequence[int]) -> dict[int, list[int]]:
    """The ranks of each host, ascending, hosts as well. hosts: by rank."""
    found: dict[int, list[int]] = {host: [] for host in sorted(set(hosts))}
    for rank, host in enumerate(hosts):
        found[host].append(rank)
    return found


def buddies_of(hosts: Sequence[int]) -> list[int]:
    """By rank: the rank that keeps its second copy; NONE on all where there is one host. hosts: by rank.

    >>> buddies_of([0, 0, 1, 1, 2, 2]), buddies_of([0, 0, 0, 5]), buddies_of([0, 0])
    ([2, 3, 4, 5, 0, 1], [3, 3, 3, 0], [-1, -1])
    """
    ranks = ranks_by_host(hosts)
    if len(ranks) == 1:
        return [NONE] * len(hosts)
    numbers = list(ranks)
    after = dict(zip(numbers, numbers[1:] + numbers[:1], strict=True))
    buddies = []
    for rank, host in enumerate(hosts):
        others = ranks[after[host]]
        buddies.append(others[ranks[host].index(rank) % len(others)])
    return buddies


def guests_of(buddies: Sequence[int], rank: int) -> list[int]:
    """The ranks whose second copy `rank` keeps.

    >>> guests_of([3, 3, 3, 0], 3)
    [0, 1, 2]
    """
    return [other for other, buddy in enumerate(buddies) if buddy == rank]


def teller_of(rank: int, locals_: Sequence[int]) -> int:
    """The one of the ranks of a host that tells which versions of `rank` the host has."""
    return locals_[rank % len(locals_)]


def newest_common(ranks: Sequence[Collection[int]]) -> int:
    """The newest step of which all ranks have a version; NONE: there is none. ranks: the steps of each.

    >>> newest_common([(8, 7), (7, 6), (-1, 7)])
    7
    """
    common = set.intersection(*(set(steps) for steps in ranks))
    return max(common, default=NONE)


def steps_of(own: Sequence[Sequence[int]], held: Sequence[Held]) -> list[set[int]]:
    """By rank: the steps of which some memory has its version.

    own: by rank the steps in the memory of its host. held: by rank what it tells of others.

    >>> steps_of([(7, 6), (-1, -1)], [{1: [7]}, {}])
    [{6, 7}, {-1, 7}]
    """
    return [
        {*steps, *(step for each in held for step in each.get(rank, ()))}
        for rank, steps in enumerate(own)
    ]


def sources_of(step: int, own: Sequence[Sequence[int]], held: Sequence[Held]) -> dict[int, int]:
    """By rank whose host lacks the version of `step`: a rank that gives it. Arguments as of `steps_of`.

    >>> sources_of(7, [(7, 6), (-1, -1)], [{1: [7]}, {}])
    {1: 0}
    """
    found: dict[int, int] = {}
    for rank, steps in enumerate(own):
        givers = [giver for giver, each in enumerate(held) if step in each.get(rank, ())]
        if step not in steps and givers:
            found[rank] = givers[0]
    return found


__all__ = [
    "Held",
    "buddies_of",
    "guests_of",
    "newest_common",
    "ranks_by_host",
    "sources_of",
    "steps_of",
    "teller_of",
]
