"""The mesh: coordinates, groups and wrong products, as literal tables; and blocks of ranks of one machine."""

import subprocess
import sys
from itertools import product

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks

from xds.ops.comm.mesh_groups import MeshGroups, block_length
from xds.ops.comm.opening import open_collectives
from xds.ops.mesh import AXES, Coordinates, Mesh

PIPES = Mesh(pipe=2, data=3)
ALL = Mesh(pipe=2, data=2, sequence=1, tensor=2)


def test_tensor_ranks_are_neighbours_and_stages_are_far_apart():
    assert [PIPES.coordinates(rank)[:2] for rank in range(6)] == [
        *((0, 0), (0, 1), (0, 2)),
        *((1, 0), (1, 1), (1, 2)),
    ]
    assert ALL.coordinates(5) == Coordinates(pipe=1, data=0, sequence=0, tensor=1)
    assert (PIPES.size, ALL.size) == (6, 8)
    assert PIPES.rank_at(pipe=1, data=2) == 5
    assert PIPES.rank_at(data=2) == 2


def test_groups():
    for mesh, axes, groups in (
        (PIPES, "data", ((0, 1, 2), (3, 4, 5))),
        (PIPES, "pipe", ((0, 3), (1, 4), (2, 5))),
        (PIPES, ("pipe", "data"), ((0, 1, 2, 3, 4, 5),)),
        (ALL, "tensor", ((0, 1), (2, 3), (4, 5), (6, 7))),
        (ALL, "data", ((0, 2), (1, 3), (4, 6), (5, 7))),
        (ALL, ("tensor", "pipe"), ((0, 1, 4, 5), (2, 3, 6, 7))),
        (ALL, (), tuple((rank,) for rank in range(8))),
    ):
        assert mesh.groups(axes) == groups
        for group in groups:
            assert mesh.length(axes) == len(group)
            assert all(mesh.ranks_along(axes, rank) == group for rank in group)


def test_any_mesh_is_a_numbering_whose_groups_cover_each_rank_once():
    for shape in product((1, 2, 3), repeat=4):
        mesh = Mesh(*shape)
        everyone = list(range(mesh.size))
        assert [mesh.rank_at(**mesh.coordinates(rank)._asdict()) for rank in everyone] == everyone
        for axis in AXES:
            assert sorted(rank for group in mesh.groups(axis) for rank in group) == everyone


def test_data_takes_what_the_other_axes_leave():
    assert Mesh.of(8) == Mesh(1, 8)
    assert Mesh.of(8, pipe=2) == Mesh(2, 4)
    assert Mesh.of(24, pipe=2, tensor=3) == Mesh(2, 4, 1, 3)


def test_a_wrong_product_is_shown():
    no_whole = "no whole number of data ranks gives this product; start"
    for arguments, message in (
        (
            {"world_size": 2, "pipe": 4},
            f"pipeline.stages (4) x data = 2 ranks: {no_whole} 4 ranks, or change pipeline.stages",
        ),
        (
            {"world_size": 9, "pipe": 2, "tensor": 2},
            f"pipeline.stages (2) x tensor_parallel.tp_size (2) x data = 9 ranks: {no_whole} 8 or 12 "
            "ranks, or change pipeline.stages or tensor_parallel.tp_size",
        ),
        ({"world_size": 0}, "world size = 0: must be at least 1"),
        ({"world_size": 4, "pipe": 0}, "pipeline.stages = 0: must be at least 1"),
    ):
        with pytest.raises(ValueError) as raised:
            Mesh.of(**arguments)
        assert str(raised.value) == message


def test_bad_calls():
    with pytest.raises(ValueError, match="rank = 6: must be from 0 to 5"):
        PIPES.coordinates(6)
    with pytest.raises(ValueError, match="data = 3: must be from 0 to 2"):
        PIPES.rank_at(data=3)
    with pytest.raises(ValueError, match="axis = 'model': must be one of pipe, data"):
        PIPES.groups("model")


def test_the_mesh_needs_no_torch():
    code = "import sys, xds.ops.mesh; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


# -- blocks of ranks ---------------------------------------------------------------------------------------


def test_hosts_with_equal_numbers_of_neighbours_are_blocks():
    for hosts, length in (
        ([], 1),
        ([5, 5, 5], 3),
        ([1, 1, 9, 9], 2),
        ([1, 1, 2], 1),
        ([1, 2, 1, 2], 1),
        ([1, 1, 2, 3, 3], 1),
    ):
        assert block_length(hosts) == length, hosts


def members():
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


def test_the_groups_of_blocks():
    ranks = run_ranks(members, 4)
    assert [found[1] for found in ranks] == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]
    assert ranks[3][0] == [[3], [0, 1, 2, 3]]
    assert ranks[3][2] == [[0, 1, 2, 3], [3]]
