"""The bytes that a rank sends for a flat buffer in one step. Pure arithmetic.

With n ranks in the group of the buffer and its shard of s bytes, a reduction and a gather send (n - 1) s each.
With R replicas of a shard whose sum has t bytes, 2 (R - 1) / R t more are sent once in a step. Kinds are those
of `engine.bytes_sent()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from ...ops.comm.collectives import Collectives
from ...ops.mesh import Axis, Mesh
from ...zero.core.building import PlannedFlat
from ...zero.core.groups import buffer_of

REDUCE, GATHER = "reduce_scatter", "all_gather"


@final
@dataclass(frozen=True)
class Repeats:
    """How often a buffer of a unit is sent in one step.

    reductions: of gradients that do not belong to the root unit.
    root_reductions: of those that do.
    gathers: of the parameters of this unit, at stage 3.
    """

    reductions: int
    root_reductions: int
    gathers: int

    def of(self, unit: str) -> int:
        """The reductions of `unit`; "" is the root."""
        return self.reductions if unit else self.root_reductions


def reduced_bytes(flat: PlannedFlat, repeats: Repeats) -> int:
    """Bytes of gradients that one rank sends."""
    if not flat.trains:
        return 0
    times = repeats.of(flat.unit)
    if flat.group.is_shared:
        times = 1
    size = flat.group.policy.sent_dtype(flat.dtype).itemsize
    return _to_others(flat) * size * times


def gathered_bytes(flat: PlannedFlat, repeats: Repeats, persistent_numel: int) -> int:
    """Bytes of parameters that one rank sends; at stage 0 of sums of gradients.

    persistent_numel: see `flat_bytes`.
    """
    policy = flat.group.policy
    if policy.shards_params:
        stays = flat.is_single or flat.unit_numel <= persistent_numel
        times = (1 if flat.trains else 0) if stays else repeats.gathers
        return _to_others(flat) * flat.dtype.itemsize * times
    if policy.shards_optimizer:
        return _to_others(flat) * flat.dtype.itemsize
    wide = policy.sum_dtype(flat.dtype)
    return _to_others(flat) * (wide if policy.holds_grads else flat.dtype).itemsize


def published_bytes(flat: PlannedFlat, num_holders: int) -> int:
    """Bytes of parameters that one rank sends to other hosts, whose `num_holders` ranks have one copy."""
    num_hosts = -(-flat.group.collectives.world_size // num_holders)
    return (num_hosts - 1) * flat.layout.shard_numel * flat.dtype.itemsize


def crossed_bytes(flat: PlannedFlat, times: int) -> int:
    """Bytes of sums that one rank sends to replicas, `times` in a step."""
    levels = flat.group.levels
    if levels is None or not flat.trains:
        return 0
    count = levels.across.world_size
    size = flat.group.policy.sum_dtype(flat.dtype).itemsize
    return 2 * (count - 1) * flat.layout.shard_numel * size // count * times


def gathers(flat: PlannedFlat, opened: Sequence[Collectives]) -> list[tuple[Collectives, int]]:
    """The groups of `opened` in which a gather of parameters sends, and the bytes of one gather in each."""
    before = [sum(group.sent_bytes.values()) for group in opened]
    whole = torch.empty(flat.layout.numel, dtype=flat.dtype, device="meta")
    sender = flat.group.legs.sender(buffer_of(flat.layout, 0, flat.dtype, flat.group))
    sender.gather(whole, flat.group.collectives.shard_of(whole)).wait()
    after = [sum(group.sent_bytes.values()) for group in opened]
    return [
        (group, now - then)
        for group, then, now in zip(opened, before, after, strict=True)
        if now > then
    ]


def _to_others(flat: PlannedFlat) -> int:
    """Elements of a shard, once for every other rank."""
    return (flat.group.collectives.world_size - 1) * flat.layout.shard_numel


# ---- which of the peers are on the same host; hosts have consecutive ranks -------------------------


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


__all__ = [
    "GATHER",
    "REDUCE",
    "Repeats",
    "crossed_bytes",
    "gathered_bytes",
    "gathers",
    "published_bytes",
    "reduced_bytes",
    "Link",
    "peers_on_host",
    "spread",
]
