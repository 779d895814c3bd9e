"""`PipelineParallelGrid`: a rank's place in a topology, and its groups, which are created on first use."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, final

import torch.distributed as dist

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


@final
class PipelineParallelGrid:
    """A rank's place on the axes pipe, data and model, with DeepSpeed's names.

    Args:
        topology: the axes "pipe" and "data", and perhaps "model".
        process_group: all ranks; None: the default group.
        known: groups that exist already, by their ranks; they are used instead of new ones.

    A group that is not known is created when it is first asked for. All its ranks must then ask for it.

    Raises:
        UsageError: there is no process group, or the topology has another number of ranks.
    """

    def __init__(
        self,
        topology: ProcessTopology,
        process_group: dist.ProcessGroup | None = None,
        known: Mapping[tuple[int, ...], dist.ProcessGroup] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "PipelineParallelGrid: there is no process group; call deepspeed.init_distributed() first"
            )
        self.global_rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self._topo = topology
        if self._topo.world_size() != self.world_size:
            raise UsageError(
                f"PipelineParallelGrid: the topology has {self._topo.world_size()} ranks and the process group "
                f"{self.world_size}; change the topology or the number of ranks"
            )
        everyone = process_group if process_group is not None else dist.group.WORLD
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {
            **(known or {}),
            tuple(range(self.world_size)): everyone,
        }
        self._place = self._topo.get_coord(self.global_rank)
        self.pipe_parallel_size = max(1, self._topo.get_dim("pipe"))
        self.data_parallel_size = max(1, self._topo.get_dim("data"))
        self.model_parallel_size = max(1, self._topo.get_dim("model"))
        self.slice_parallel_size = self.model_parallel_size
        self.stage_id = self._at("pipe")
        self.data_parallel_id = self._at("data")
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.dp_group = list(self._ranks("data"))
        self.pp_group = list(self._ranks("pipe"))
        self.slice_group = list(self._ranks("model"))

    def topology(self) -> ProcessTopology:
        """The topology of all ranks."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of another stage, at this rank's other coordinates, or at those given."""
        return self._topo.get_rank(**{**self._place._asdict(), "pipe": stage_id, **kwargs})

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """The group of all stages of this rank's model."""
        return self._group("pipe")

    def get_data_parallel_rank(self) -> int:
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The group of this stage's data ranks."""
        return self._group("data")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The ranks of `get_data_parallel_group`."""
        return list(self.dp_group)

    def get_model_parallel_rank(self) -> int:
        return self._at("model")

    def get_model_parallel_world_size(self) -> int:
        """Ranks that share the tensors of one stage; stages do not count."""
        return self.model_parallel_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The group of ranks that share the tensors of this stage."""
        return self._group("model")

    def get_slice_parallel_rank(self) -> int:
        return self._at("model")

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    # Megatron's newer names
    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    def get_slice_parallel_group(self) -> dist.ProcessGroup:
        return self._group("model")

    def _at(self, axis: str) -> int:
        return int(getattr(self._place, axis, 0))

    def _ranks(self, axis: str) -> tuple[int, ...]:
        lists = self._topo.get_axis_comm_lists(axis)
        own = [group for group in lists if self.global_rank in group]
        return tuple(own[0]) if own else (self.global_rank,)

    def _group(self, axis: str) -> dist.ProcessGroup:
        ranks = self._ranks(axis)
        found = self._groups.get(ranks)
        if found is None:
            found = dist.new_group(list(ranks), use_local_synchronization=True)
            self._groups[ranks] = found
        return found
