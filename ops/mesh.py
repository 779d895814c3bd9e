"""The mesh of ranks: which rank has which coordinate of pipe, data, sequence and tensor. Pure arithmetic.

The axes are in this order and the last one varies fastest. So tensor ranks are neighbours, which are usually
on one node, and the data ranks of one pipeline stage are consecutive:

    Mesh(pipe=2, data=3)        data 0   1   2
                        pipe 0       0   1   2
                        pipe 1       3   4   5

Nothing here imports torch, and no process group is created here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, final

Axis = Literal["pipe", "data", "sequence", "tensor"]
AXES: tuple[Axis, ...] = ("pipe", "data", "sequence", "tensor")
SETTINGS: dict[Axis, str] = {  # the key of the config that sets the size of an axis
    "pipe": "pipeline.stages",
    "sequence": "sequence_parallel_size",
    "tensor": "tensor_parallel.tp_size",
}


@final
class Coordinates(NamedTuple):
    """The place of one rank on every axis."""

    pipe: int
    data: int
    sequence: int
    tensor: int


@final
@dataclass(frozen=True)
class Mesh:
    """All ranks as a grid: `size` = pipe x data x sequence x tensor ranks.

    experts is no axis: so many neighbouring ranks of a pipeline stage share the experts of a layer. It divides
    the ranks of a stage.

    Raises:
        ValueError: an axis is shorter than 1, or `experts` does not divide the ranks of a stage.
    """

    pipe: int
    data: int
    sequence: int = 1
    tensor: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        for axis, length in zip(AXES, self.shape, strict=True):
            if length < 1:
                raise ValueError(f"{SETTINGS.get(axis, axis)} = {length}: must be at least 1")
        if self.experts < 1 or self.size // self.pipe % self.experts:
            raise ValueError(
                f"experts = {self.experts}: must divide the {self.size // self.pipe} ranks of a stage"
            )

    @staticmethod
    def of(world_size: int, *, pipe: int = 1, sequence: int = 1, tensor: int = 1) -> Mesh:
        """The mesh of `world_size` ranks; the data axis takes what the other axes leave.

        Raises:
            ValueError: `world_size` is not a multiple of the product of the other axes.

        >>> Mesh.of(8, pipe=2)
        Mesh(pipe=2, data=4, sequence=1, tensor=1, experts=1)
        """
        mesh = Mesh(pipe, 1, sequence, tensor)
        if world_size < 1:
            raise ValueError(f"world size = {world_size}: must be at least 1")
        if world_size % mesh.size:
            raise ValueError(_not_a_multiple(world_size, mesh))
        return Mesh(pipe, world_size // mesh.size, sequence, tensor)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The lengths of the axes, in the order of `AXES`."""
        return (self.pipe, self.data, self.sequence, self.tensor)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def has_parts(self) -> bool:
        """Ranks have different parts of the model: layers, slices of them, or experts."""
        return self.pipe * self.tensor * self.experts > 1

    def parts(self) -> list[tuple[int, ...]]:
        """The ranks that have the same part of the model, in the order of their first ranks.

        >>> Mesh(pipe=1, data=2, tensor=2).parts()
        [(0, 2), (1, 3)]
        >>> Mesh(pipe=1, data=4, experts=2).parts()
        [(0, 2), (1, 3)]
        """
        found: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(self.size):
            place = self.coordinates(rank)
            found.setdefault((place.pipe, place.tensor, rank % self.experts), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def length(self, axes: Axis | Iterable[Axis]) -> int:
        """The number of ranks in a group along one or several axes."""
        return math.prod(self.shape[AXES.index(axis)] for axis in _several(axes))

    def coordinates(self, rank: int) -> Coordinates:
        """The place of `rank` on every axis.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank = {rank}: must be from 0 to {self.size - 1}, in {self}")
        found = []
        for length in reversed(self.shape):
            rank, at = divmod(rank, length)
            found.append(at)
        return Coordinates(*reversed(found))

    def rank_at(self, *, pipe: int = 0, data: int = 0, sequence: int = 0, tensor: int = 0) -> int:
        """The rank at these coordinates.

        Raises:
            ValueError: a coordinate is outside its axis.
        """
        rank = 0
        for axis, length, at in zip(AXES, self.shape, (pipe, data, sequence, tensor), strict=True):
            if not 0 <= at < length:
                raise ValueError(f"{axis} = {at}: must be from 0 to {length - 1}, in {self}")
            rank = rank * length + at
        return rank

    def ranks_along(self, axes: Axis | Iterable[Axis], rank: int) -> tuple[int, ...]:
        """The group of `rank` along one or several axes: all ranks that differ from it only there, ascending.

        >>> Mesh(pipe=2, data=3).ranks_along("pipe", 4)
        (1, 4)
        """
        names = _several(axes)
        own = self.coordinates(rank)
        return self._box(
            range(length) if axis in names else (at,)
            for axis, length, at in zip(AXES, self.shape, own, strict=True)
        )

    def groups(self, axes: Axis | Iterable[Axis]) -> tuple[tuple[int, ...], ...]:
        """All groups along one or several axes, in the order of their first ranks. Each rank is in one.

        >>> Mesh(pipe=2, data=3).groups("pipe")
        ((0, 3), (1, 4), (2, 5))
        """
        return _groups_of(self, _several(axes))

    def _box(self, along: Iterable[Iterable[int]]) -> tuple[int, ...]:
        """The ranks at every combination of the given coordinates of each axis."""
        ranks = [0]
        for length, places in zip(self.shape, map(tuple, along), strict=True):
            ranks = [rank * length + place for rank in ranks for place in places]
        return tuple(ranks)


@lru_cache(maxsize=32)  # a plan of 16,384 ranks asks for each as often as it has stages
def _groups_of(mesh: Mesh, names: tuple[Axis, ...]) -> tuple[tuple[int, ...], ...]:
    firsts = mesh._box(
        (0,) if axis in names else range(length)
        for axis, length in zip(AXES, mesh.shape, strict=True)
    )
    return tuple(mesh.ranks_along(names, first) for first in firsts)


def _several(axes: Axis | Iterable[Axis]) -> tuple[Axis, ...]:
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    for name in names:
        if name not in AXES:
            raise ValueError(f"axis = {name!r}: must be one of {', '.join(AXES)}")
    return names


def _not_a_multiple(world_size: int, mesh: Mesh) -> str:
    """The message for a number of ranks that the axes without data do not divide."""
    used = {
        SETTINGS[axis]: length
        for axis, length in zip(AXES, mesh.shape, strict=True)
        if axis in SETTINGS and length > 1
    }
    factors = " x ".join(f"{setting} ({length})" for setting, length in used.items())
    below = world_size // mesh.size * mesh.size
    near = f"{below} or {below + mesh.size}" if below else str(mesh.size)
    return (
        f"{factors} x data = {world_size} ranks: no whole number of data ranks gives this product; "
        f"start {near} ranks, or change {' or '.join(used)}"
    )
