"""Ranks as a grid of named axes, with DeepSpeed's names. The last axis varies fastest. Pure arithmetic."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

from ....ops.mesh import Mesh
from ....utils.errors import UsageError


class ProcessTopology:
    """Which rank has which coordinates on axes of any names.

    It is neither abstract nor final, because scripts both create it and test for it with isinstance.

    Args:
        axes: names, the slowest axis first.
        dims: lengths, one for each axis.
    Raises:
        UsageError: the numbers of axes and lengths differ, or a length is below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes):
            raise UsageError(
                f"axes = {list(axes)}, dims = {list(dims)}: each axis needs one name and one length; give "
                "lists of equal length with different names"
            )
        for axis, length in zip(axes, dims, strict=True):
            if length < 1:
                raise UsageError(
                    f"dims: the length of axis {axis} is {length}; it must be at least 1"
                )
        self.axes = list(axes)
        self.dims = list(dims)
        coordinates: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coordinates
        places = product(*(range(length) for length in self.dims))
        self.mapping: dict[Any, int] = {
            self.ProcessCoord._make(place): rank for rank, place in enumerate(places)
        }
        self._places = list(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)

    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._places)

    def get_axis_names(self) -> list[str]:
        """The names of the axes, the slowest first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """The length of an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at these coordinates, one for each axis.

        Raises:
            ValueError: a coordinate is missing, outside its axis, or of no axis.
        """
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(
                f"get_rank({', '.join(coord_kwargs)}): needs exactly one coordinate for each of "
                f"{', '.join(self.axes)}; use filter_match() for several ranks"
            )
        place = self.ProcessCoord(**coord_kwargs)
        if place not in self.mapping:
            raise ValueError(f"{place}: the lengths of the axes are {self.dims}")
        return self.mapping[place]

    def get_coord(self, rank: int) -> Any:
        """The coordinates of `rank`, a named tuple. Raises ValueError: there is no such rank."""
        if not 0 <= rank < len(self._places):
            raise ValueError(f"rank = {rank}: must be from 0 to {len(self._places) - 1}")
        return self._places[rank]

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """The coordinates of `rank` as text, as in "model_01", without the axes in `omit_axes`."""
        place = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in shown)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """All groups of ranks that differ on `axis` only, in rank order; none if there is no such axis."""
        if axis not in self.axes:
            return []
        at = self.axes.index(axis)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self._places):
            groups.setdefault((*place[:at], *place[at + 1 :]), []).append(rank)
        return list(groups.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks that have all these coordinates, ascending."""
        return [
            rank
            for rank, place in enumerate(self._places)
            if all(getattr(place, axis) == wanted for axis, wanted in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks whose coordinate on `axis` is `idx`, ascending."""
        return self.filter_match(**{axis: idx})


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages, each with neighbouring data ranks: the mesh of xds."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages and data ranks, and neighbouring ranks that share tensors: the mesh of xds."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def topology_of(mesh: Mesh) -> ProcessTopology:
    """The topology with the ranks of `mesh`; "model" is its tensor axis. For meshes without sequence ranks."""
    if mesh.tensor == 1:
        return PipeDataParallelTopology(mesh.pipe, mesh.data)
    return PipeModelDataParallelTopology(mesh.pipe, mesh.tensor, mesh.data)


__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "ProcessTopology",
    "topology_of",
]
