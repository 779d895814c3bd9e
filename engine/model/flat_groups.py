"""Opens the group of every flat buffer: which ranks hold it, and how they send it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from ...compression.scheme import BuildScheme, ExactScheme
from ...ops.comm.collectives import Collectives
from ...ops.comm.mesh_groups import AxisGroups
from ...ops.mesh import Axis
from ...zero.layout.groups import FlatGroup, FlatGroups, Policy
from ...zero.layout.layout import Box
from ...zero.layout.slices import Slices
from .shard_groups import ALL_RANKS, DATA_AXES, ShardGroups

if TYPE_CHECKING:
    from ...tensor.slicing import Sliced
    from .pipelining import Cut

ALL_OF_A_STAGE: tuple[Axis, ...] = ("data", "sequence", "tensor")


class BuildPolicy(Protocol):
    """The policy of a ZeRO stage over a number of ranks."""

    def __call__(self, stage: int, world_size: int) -> Policy: ...


def open_flat_groups(
    mesh: AxisGroups,
    world: Collectives,
    policy: BuildPolicy,
    stage: int,
    found: Cut | None,
    sliced: Sliced | None = None,
    scheme: BuildScheme = ExactScheme,
    shard_groups: ShardGroups = ALL_RANKS,
) -> FlatGroups:
    """The group of every flat buffer. For all ranks.

    Args:
        sliced: what the tensor ranks have cut; None: nothing.
        scheme: how gradients and parameters are sent.
        shard_groups: which data-parallel ranks a buffer is sharded over.
    """
    num_tensor = mesh.mesh.tensor
    is_one = found is None and num_tensor == 1
    collectives = world if is_one else mesh.along(DATA_AXES)
    data = shard_groups.open(mesh, collectives, policy, stage, scheme)
    if is_one:
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
    if sliced is not None:
        for number, key_group in enumerate(_copied(mesh, world, sliced), first + len(kinds)):
            copies, keys = key_group
            kept = policy(reached, copies.world_size)
            group = FlatGroup(copies, scheme(copies), kept, number)
            by_param |= dict.fromkeys(keys.difference(in_stages), group)
    names = {} if found is None else dict(found.part.names)
    slices = {} if sliced is None else _slices(mesh, sliced, found)
    return FlatGroups(world, data, mesh.mesh, by_param, names, slices)


def _shared_kinds(
    found: Cut | None, sliced: Sliced | None
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
    for key, piece in sliced.slices.items():
        count = len(set(piece.by_rank))
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


def _slices(mesh: AxisGroups, sliced: Sliced, found: Cut | None) -> dict[int, Slices]:
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
    for key, one in sliced.slices.items():
        boxes = tuple(Box(one.whole, one.dim, ranges) for ranges in one.by_rank)
        ranks = shared.get(names.get(key, ""), (mesh.coordinate("pipe"),))
        is_first = mesh.coordinate("pipe") == min(ranks)
        is_first = is_first and not (mesh.coordinate("data") or mesh.coordinate("sequence"))
        of_stages = over_stages.get(ranks)
        result[key] = Slices(tensor, of_stages or together, boxes, is_first)
    return result


__all__ = ["BuildPolicy", "open_flat_groups"]
