"""Opens the group of every flat buffer: which ranks hold it, and how they send it."""

from __future__ import annotations

import logging
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import torch

from ...compression.scheme import BuildScheme, CommScheme, ExactScheme
from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import all_gather_json, host_numbers
from ...ops.comm.mesh_groups import AxisGroups, BlocksOf, Levels, block_length, blocks_of
from ...ops.mesh import Axis, Mesh
from ...utils.errors import UsageError
from ...zero.layout.groups import FlatGroup, FlatGroups, Policy
from ...zero.layout.slices import Slices
from ..config.config import Config

if TYPE_CHECKING:
    from ...experts.cut import Cut
    from ...tensor.slicing import Sliced
    from .pipeline import StageModules


# -- over which data-parallel ranks most buffers are sharded: all, or blocks of them (MiCS) --------------
# data ranks   0 1 2 3 | 4 5 6 7      mics_shard_size = 4, two hosts of two ranks in each block
# hosts        a a b b   c c d d      mics_hierarchical_params_gather: 0 2 / 1 3 first, then 0 1 / 2 3

log = logging.getLogger("xds")

DATA_AXES: tuple[Axis, ...] = ("data", "sequence")
HIERARCHICAL = "zero_optimization.mics_hierarchical_params_gather = true"


class RankHost(NamedTuple):
    """The host of a rank: a number that identifies it, and its name."""

    number: int
    name: str


Hosts = Callable[[], Sequence[RankHost]]  # of all ranks, in their order


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


def hosts_of(world: Collectives) -> list[RankHost]:
    """The host of each rank. A collective."""
    names = all_gather_json(world, platform.node(), "names of hosts")
    return [RankHost(*pair) for pair in zip(host_numbers(world), names, strict=True)]


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


def ranks_of_host(mesh: Mesh, size: int, hosts: Sequence[RankHost]) -> int:
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


def _described(ranks: Sequence[int], hosts: Sequence[RankHost]) -> str:
    """The ranks of a shard group on each of its hosts, in words."""
    on_host: dict[RankHost, list[int]] = {}
    for rank in ranks:
        on_host.setdefault(hosts[rank], []).append(rank)
    parts = [f"{', '.join(map(str, found))} on host {host.name}" for host, found in on_host.items()]
    return f"the group of rank {ranks[0]} has ranks {' and '.join(parts)}"


ALL_RANKS = OneGroup()


ALL_OF_A_STAGE: tuple[Axis, ...] = ("data", "sequence", "tensor")


@final
@dataclass(frozen=True, eq=False)
class Division:
    """What this rank has of a model; None: nothing is cut in this way.

    stages: its pipeline stage. sliced: its slices of layers. experts: its experts, which get other tokens than
    the rest of the model.
    """

    stages: StageModules | None = None
    sliced: Sliced | None = None
    experts: Cut | None = None


class BuildPolicy(Protocol):
    """The policy of a ZeRO stage over a number of ranks."""

    def __call__(self, stage: int, world_size: int) -> Policy: ...


def open_flat_groups(
    mesh: AxisGroups,
    world: Collectives,
    policy: BuildPolicy,
    stage: int,
    division: Division,
    scheme: BuildScheme = ExactScheme,
    shard_groups: ShardGroups = ALL_RANKS,
) -> FlatGroups:
    """The group of every flat buffer. For all ranks.

    Args:
        scheme: how gradients and parameters are sent.
        shard_groups: which data-parallel ranks a buffer is sharded over.
    """
    found, sliced = division.stages, division.sliced
    num_tensor = mesh.mesh.tensor
    is_one = found is None and num_tensor == 1
    collectives = world if is_one else mesh.along(DATA_AXES)
    data = shard_groups.open(mesh, collectives, policy, stage, scheme)
    if is_one and division.experts is None:
        return FlatGroups(world, data, mesh.mesh)
    by_param: dict[int, FlatGroup] = {}
    # all groups drop parameters or none
    reached = stage if data.policy.shards_params else min(stage, 2)
    if sliced is not None:
        both = mesh.along(ALL_OF_A_STAGE)
        kept = policy(reached, both.world_size)
        equal = FlatGroup(both, scheme(both, num_tensor), kept, 1)  # gradients are equal on all
        parts = FlatGroup(both, scheme(both), kept, 2)
        by_param = {key: parts if key in sliced.partial else equal for key in sliced.whole}
    kinds = _shared_kinds(found, sliced)
    first = 3  # the number of the first group, the same on all ranks
    for number, (stages, is_cut) in enumerate(kinds, first):
        shared = mesh.shared(stages, by_slice=is_cut)
        if shared is None:
            continue
        sent = scheme(shared, 1 if is_cut else num_tensor)
        kept = policy(min(stage, 2), shared.world_size)
        group = FlatGroup(shared, sent, kept, number, is_shared=True)
        by_param |= dict.fromkeys(kinds[stages, is_cut], group)
    in_stages = {key for keys in kinds.values() for key in keys}
    copied = [] if sliced is None else _copied(mesh, world, sliced)
    for number, (copies, keys) in enumerate(copied, first + len(kinds)):
        kept = policy(reached, copies.world_size)
        group = FlatGroup(copies, scheme(copies), kept, number)
        by_param |= dict.fromkeys(keys.difference(in_stages), group)
    names = {} if found is None else dict(found.part.names)
    slices = {} if sliced is None else _slices(mesh, sliced, found)
    grid = mesh.mesh
    if division.experts is not None:
        cut = division.experts
        grid = replace(grid, experts=cut.num_ranks)
        whole = collectives if num_tensor == 1 else mesh.along(ALL_OF_A_STAGE)
        # the ranks with the same experts are across the blocks of ranks that share them
        levels = mesh.blocks(ALL_OF_A_STAGE, whole, cut.num_ranks)
        kept = policy(reached, levels.across.world_size)
        number = first + len(kinds) + len(copied)
        group = FlatGroup(levels.across, scheme(levels.across), kept, number)
        by_param |= dict.fromkeys(cut.slices, group)
        if cut.num_ranks > 1:
            slices |= _slices_of_experts(cut, levels)
    return FlatGroups(world, data, grid, by_param, names, slices)


def _slices_of_experts(cut: Cut, levels: Levels) -> dict[int, Slices]:
    is_first = levels.across.rank == 0
    return {
        key: Slices(levels.inside, levels.whole, boxes, is_first)
        for key, boxes in cut.slices.items()
    }


def _shared_kinds(
    found: StageModules | None, sliced: Sliced | None
) -> dict[tuple[tuple[int, ...], bool], set[int]]:
    """(pipeline ranks, is it cut) -> id of this rank's parameters, for what several stages hold. Sorted.

    The keys are the same on all ranks.
    """
    if found is None:
        return {}
    part, cut_names = found.part, set() if sliced is None else sliced.names
    kinds = sorted({(ranks, name in cut_names) for name, ranks in part.shared.items()})
    keys: dict[tuple[tuple[int, ...], bool], set[int]] = {kind: set() for kind in kinds}
    for key, name in part.names.items():
        if name in part.shared:
            keys[part.shared[name], name in cut_names].add(key)
    return keys


def _copied(
    mesh: AxisGroups, world: Collectives, sliced: Sliced
) -> list[tuple[Collectives, set[int]]]:
    """The ranks that hold copies of slices, with id of these parameters. For all ranks; in one order."""
    from ...tensor.shares import unit_of

    num_tensor, rank = mesh.mesh.tensor, mesh.coordinate("tensor")
    by_count: dict[int, set[int]] = {}  # number of different slices
    for key, boxes in sliced.slices.items():
        count = len(set(boxes))
        if count < num_tensor:
            by_count.setdefault(count, set()).add(key)
    mine = torch.zeros(num_tensor, dtype=torch.int64, device=world.device)
    mine[list(by_count)] = 1
    counts = world.gather_small(mine, what="copies of slices").amax(0).nonzero()[:, 0].tolist()
    found = []
    for count in counts:
        sets: list[list[int]] = [[] for _ in range(count)]
        for other in range(num_tensor):
            sets[unit_of(count, num_tensor, other)].append(other)
        keys = by_count.get(count, set())
        assert all(sliced.copies(key, rank) in map(tuple, sets) for key in keys)
        found.append((mesh.within(ALL_OF_A_STAGE, sets), keys))
    return found


def _slices(mesh: AxisGroups, sliced: Sliced, found: StageModules | None) -> dict[int, Slices]:
    """The slices of each parameter on all tensor ranks. For all ranks."""
    tensor, together = mesh.along("tensor"), mesh.along(ALL_OF_A_STAGE)
    part = None if found is None else found.part
    names = {} if part is None else part.names
    shared = {} if part is None else part.shared
    over_stages = {
        ranks: mesh.shared(ranks)
        for ranks in sorted({ranks for name, ranks in shared.items() if name in sliced.names})
    }
    result = {}
    for key, boxes in sliced.slices.items():
        ranks = shared.get(names.get(key, ""), (mesh.coordinate("pipe"),))
        is_first = mesh.coordinate("pipe") == min(ranks)
        is_first = is_first and not (mesh.coordinate("data") or mesh.coordinate("sequence"))
        of_stages = over_stages.get(ranks)
        result[key] = Slices(tensor, of_stages or together, boxes, is_first)
    return result


__all__ = [
    "ALL_RANKS",
    "BuildPolicy",
    "DATA_AXES",
    "Division",
    "RankHost",
    "Hosts",
    "ShardGroups",
    "build_shard_groups",
    "hosts_of",
    "open_flat_groups",
]
