"""Units of failure: the smallest sets of ranks that each hold the whole state. Pure arithmetic.

    stage 0, 4 ranks                          (0) (1) (2) (3)
    stage 1 to 3, mics_shard_size 2           (0 1) (2 3)             a shard group
    2 pipeline stages, 2 data ranks           (0 2) (1 3)             a pipeline: rank = stage x 2 + data rank
    stage 1 to 3 without replicas             (0 1 2 3)               one copy: see `Recovery.keeps_versions`

A unit is a range of data ranks, with their pipeline stages, sequence ranks and slices. So the ranks of any
units are a mesh again, with fewer data ranks, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from ..ops.mesh import Mesh


def data_ranks_of_unit(mesh: Mesh, shard_ranks: int) -> int:
    """The data ranks of a unit. shard_ranks: so many data and sequence ranks share one copy of states.

    >>> data_ranks_of_unit(Mesh(pipe=2, data=4), 1), data_ranks_of_unit(Mesh(pipe=1, data=4), 2)
    (1, 2)
    """
    return shard_ranks // gcd(shard_ranks, mesh.sequence)


def units_of(mesh: Mesh, shard_ranks: int) -> list[tuple[int, ...]]:
    """The ranks of each unit, ascending; units in the order of their data ranks.

    >>> units_of(Mesh(pipe=2, data=2, tensor=2), 1)
    [(0, 1, 4, 5), (2, 3, 6, 7)]
    """
    length = data_ranks_of_unit(mesh, shard_ranks)
    units: list[list[int]] = [[] for _ in range(mesh.data // length)]
    for rank in range(mesh.size):
        units[mesh.coordinates(rank).data // length].append(rank)
    return [tuple(unit) for unit in units]


def mesh_of_units(mesh: Mesh, shard_ranks: int, num_units: int) -> Mesh:
    """The mesh of the ranks of so many units, ascending."""
    return replace(mesh, data=num_units * data_ranks_of_unit(mesh, shard_ranks))


def shares_of(
    units: Sequence[int], num_units: int, num_micro_batches: int, unit: int
) -> list[tuple[int, int]]:
    """The micro-batches (unit, number) of a step that `unit` runs: its own, and those of units that are gone.

    units: that are left, of `num_units`. num_micro_batches: of each unit in a step.

    >>> shares_of((0, 2), 3, 2, 0), shares_of((0, 2), 3, 2, 2)
    ([(0, 0), (0, 1), (1, 0)], [(2, 0), (2, 1), (1, 1)])
    """
    numbers = range(num_micro_batches)
    gone = [other for other in range(num_units) if other not in units]
    left_over = [(other, number) for other in gone for number in numbers]
    own = [(unit, number) for number in numbers]
    return own + left_over[units.index(unit) :: len(units)]


__all__ = ["data_ranks_of_unit", "mesh_of_units", "shares_of", "units_of"]
