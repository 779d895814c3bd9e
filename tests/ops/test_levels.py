"""Tests of blocks of ranks: their number from the hosts, and their groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from warm_ranks import warm

from xds.ops.comm.levels import block_length
from xds.ops.comm.mesh_groups import MeshGroups
from xds.ops.comm.opening import open_collectives
from xds.ops.mesh import Mesh


@pytest.mark.parametrize(
    ("hosts", "length"),
    [
        ([], 1),
        ([5], 1),
        ([5, 5, 5], 3),
        ([1, 1, 9, 9], 2),
        ([1, 2, 3], 1),
        ([1, 1, 2], 1),
        ([1, 2, 1, 2], 1),
        ([1, 1, 2, 3, 3], 1),
    ],
)
def test_hosts_with_equal_numbers_of_neighbours_are_blocks(hosts: list[int], length: int) -> None:
    assert block_length(hosts) == length


def members() -> Any:
    group = dist.group.WORLD
    assert group is not None
    world = open_collectives(group, torch.device("cpu"))
    groups = MeshGroups(Mesh.of(4), group, world, 30.0)
    found = []
    for length in (1, 2, 4):
        levels = groups.blocks("data", world, length)
        own = torch.tensor([world.rank])
        found.append(
            [level.gather_small(own).flatten().tolist() for level in (levels.inside, levels.across)]
        )
    return found


def test_the_groups_of_blocks() -> None:
    ranks = warm(4).run(members)
    assert [found[1] for found in ranks] == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]
    assert ranks[3][0] == [[3], [0, 1, 2, 3]]
    assert ranks[3][2] == [[0, 1, 2, 3], [3]]
