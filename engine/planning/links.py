"""How many ranks of a group are on the host of one of them. Pure arithmetic.

Hosts have consecutive ranks: rank r is on host r // ranks_per_host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ...ops.mesh import Axis, Mesh


@final
@dataclass(frozen=True)
class Link:
    """Bytes that one rank sends in a step to ranks of its own host, and to others."""

    inside: int = 0
    between: int = 0

    @property
    def total(self) -> int:
        return self.inside + self.between

    def __add__(self, other: Link) -> Link:
        return Link(self.inside + other.inside, self.between + other.between)


def peers_on_host(
    mesh: Mesh,
    rank: int,
    axes: Sequence[Axis],
    ranks_per_host: int,
    stages: Sequence[int] = (),
    tensors: Sequence[int] = (),
    places: Sequence[int] = (),
) -> int:
    """Other ranks of the group of `rank` along `axes` that are on its host.

    stages, tensors: where not empty, the group has the ranks of these pipeline stages or tensor ranks only.
    places: where not empty, it has these of the ranks along `axes`, counted in their order.

    >>> peers_on_host(Mesh(pipe=1, data=4, tensor=2), 0, ["data"], 4)
    1
    """
    own = mesh.coordinates(rank)
    host = rank // ranks_per_host
    found = 0
    for other in range(host * ranks_per_host, min((host + 1) * ranks_per_host, mesh.size)):
        at = mesh.coordinates(other)
        same = all(
            here == there or axis in axes
            for axis, here, there in zip(own._fields, own, at, strict=True)
        )
        is_in = (not stages or at.pipe in stages) and (not tensors or at.tensor in tensors)
        is_in = is_in and (not places or mesh.ranks_along(axes, other).index(other) in places)
        found += other != rank and same and is_in
    return found


def spread(num_bytes: int, num_peers: int, on_host: int) -> Link:
    """`num_bytes` in equal parts for `num_peers` ranks, of which `on_host` are on this rank's host.

    >>> spread(700, 7, 3)
    Link(inside=300, between=400)
    """
    if not num_peers:
        return Link()
    inside = num_bytes * on_host // num_peers
    return Link(inside, num_bytes - inside)


__all__ = ["Link", "peers_on_host", "spread"]
