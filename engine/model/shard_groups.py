"""Chooses over which data-parallel ranks most flat buffers are sharded: all of them, or blocks of them (MiCS).

data ranks   0 1 2 3 | 4 5 6 7      mics_shard_size = 4, two hosts of two ranks in each block
hosts        a a b b   c c d d      mics_hierarchical_params_gather: 0 2 / 1 3 first, then 0 1 / 2 3
"""

from __future__ import annotations

import logging
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from ...compression.scheme import BuildScheme, CommScheme
from ...ops.comm.collectives import Collectives
from ...ops.comm.hosts import host_numbers
from ...ops.comm.json_values import exchange
from ...ops.comm.levels import block_length
from ...ops.comm.mesh_groups import AxisGroups, BlocksOf, blocks_of
from ...ops.mesh import Axis, Mesh
from ...utils.errors import UsageError
from ...zero.layout.groups import FlatGroup, Policy
from ..config.config import Config

log = logging.getLogger("xds")

DATA_AXES: tuple[Axis, ...] = ("data", "sequence")
HIERARCHICAL = "zero_optimization.mics_hierarchical_params_gather = true"


class Host(NamedTuple):
    """The host of a rank: a number that identifies it, and its name."""

    number: int
    name: str


Hosts = Callable[[], Sequence[Host]]  # of all ranks, in their order


class ShardGroups(ABC):
    """Decides which of the data-parallel ranks a buffer is sharded over."""

    @abstractmethod
    def open(
        self,
        mesh: AxisGroups,
        whole: Collectives,
        policy: Callable[[int, int], Policy],
        stage: int,
        scheme: BuildScheme,
    ) -> FlatGroup:
        """The data group of this rank. For all ranks.

        whole: all its data-parallel ranks. policy: of a stage over a number of ranks.
        """


@final
class OneGroup(ShardGroups):
    """Over all of them."""

    def open(
        self,
        mesh: AxisGroups,
        whole: Collectives,
        policy: Callable[[int, int], Policy],
        stage: int,
        scheme: BuildScheme,
    ) -> FlatGroup:
        own = scheme(whole, split=BlocksOf(mesh, DATA_AXES, whole))
        return FlatGroup(whole, own, policy(stage, whole.world_size))


@final
class Replicas(ShardGroups):
    """Over blocks of `size` neighbours. The other blocks have replicas, and gradients are summed over them."""

    def __init__(self, size: int, ranks_of_host: int) -> None:
        """size: more than one. ranks_of_host: gathers of parameters in two levels; `size`: in one."""
        self._size = size
        self._ranks_of_host = ranks_of_host

    def open(
        self,
        mesh: AxisGroups,
        whole: Collectives,
        policy: Callable[[int, int], Policy],
        stage: int,
        scheme: BuildScheme,
    ) -> FlatGroup:
        kept = policy(stage, self._size)
        if self._size == whole.world_size:
            return FlatGroup(whole, self._scheme(mesh, whole, scheme), kept)
        from ...compression.replicas import ReplicatedScheme

        levels = mesh.blocks(DATA_AXES, whole, self._size)
        own = ReplicatedScheme(self._scheme(mesh, levels.inside, scheme), levels)
        return FlatGroup(levels.inside, own, kept, levels=levels)

    def _scheme(self, mesh: AxisGroups, inside: Collectives, scheme: BuildScheme) -> CommScheme:
        """Of a block, without its replicas."""
        own = scheme(inside, split=BlocksOf(mesh, DATA_AXES, inside))
        if self._ranks_of_host == self._size:
            return own
        from ...compression.two_levels import TwoLevelScheme

        return TwoLevelScheme(own, mesh.blocks(DATA_AXES, inside, self._ranks_of_host))


@final
class OnlyReplicas(ShardGroups):
    """Blocks of one rank: nothing is sharded, and gradients are summed over all ranks, as at stage 0."""

    def open(
        self,
        mesh: AxisGroups,
        whole: Collectives,
        policy: Callable[[int, int], Policy],
        stage: int,
        scheme: BuildScheme,
    ) -> FlatGroup:
        return OneGroup().open(mesh, whole, policy, 0, scheme)


def hosts_of(world: Collectives) -> list[Host]:
    """The host of each rank. A collective."""
    names = exchange(world, platform.node(), "names of hosts")
    return [Host(*pair) for pair in zip(host_numbers(world), names, strict=True)]


def build_shard_groups(config: Config, mesh: Mesh, hosts: Hosts, *, is_first: bool) -> ShardGroups:
    """What the config asks for. For all ranks: `hosts` may be a collective. is_first: logs what has no effect.

    Raises:
        UsageError: a gather in two levels, and a shard group has unequal numbers of ranks on its hosts.
    """
    zero = config.zero_optimization
    size = zero.mics_shard_size
    if size <= 0 or zero.stage == 0:
        return OneGroup()
    if size == 1:
        return OnlyReplicas()
    if not zero.mics_hierarchical_params_gather:
        return Replicas(size, size)
    length = ranks_of_host(mesh, size, hosts())
    if length in (1, size) and is_first:
        where = "in one host" if length == size else "with one rank on each host"
        log.info(
            "%s has no effect: every shard group (mics_shard_size = %d) is %s",
            HIERARCHICAL,
            size,
            where,
        )
    return Replicas(size, size if length == 1 else length)


def ranks_of_host(mesh: Mesh, size: int, hosts: Sequence[Host]) -> int:
    """The ranks that a shard group of `size` ranks has on each of its hosts.

    Raises:
        UsageError: they are not the same number for all groups and hosts.
    """
    groups = blocks_of(mesh, DATA_AXES, size)
    found = {_length([hosts[rank].number for rank in ranks]) for ranks in groups}
    if len(found) == 1 and None not in found:
        return next(length for length in found if length is not None)
    text = "; ".join(_described(ranks, hosts) for ranks in groups[:2])
    raise UsageError(
        f"{HIERARCHICAL}: it needs the same number of neighbouring ranks of a shard group "
        f"(mics_shard_size = {size}) on every host, and {text}; set mics_shard_size to a multiple or a divisor "
        "of the ranks of a host, start as many ranks on every host, or set the key to false"
    )


def _length(numbers: Sequence[int]) -> int | None:
    """As `block_length`, but None where the hosts are uneven."""
    found = block_length(numbers)
    return found if found > 1 or len(set(numbers)) == len(numbers) else None


def _described(ranks: Sequence[int], hosts: Sequence[Host]) -> str:
    """The ranks of a shard group on each of its hosts, in words."""
    on_host: dict[Host, list[int]] = {}
    for rank in ranks:
        on_host.setdefault(hosts[rank], []).append(rank)
    parts = [f"{', '.join(map(str, found))} on host {host.name}" for host, found in on_host.items()]
    return f"the group of rank {ranks[0]} has ranks {' and '.join(parts)}"


ALL_RANKS = OneGroup()

__all__ = [
    "ALL_RANKS",
    "DATA_AXES",
    "Host",
    "Hosts",
    "ShardGroups",
    "build_shard_groups",
    "hosts_of",
]
