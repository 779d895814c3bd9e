"""`PipelineParallelGrid`: a rank's place in a topology, and its groups, which are created on first use."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import final

import torch.distributed as dist

from ....utils.errors import UsageError
from .coordinates import PipeDataParallelTopology, ProcessTopology


@final
class PipelineParallelGrid:
    """A rank's place on the axes pipe, data and model, with DeepSpeed's names.

    Args:
        topology: the axes "pipe" and "data", and perhaps "model". None: the prime factors of the number of
            ranks are given to pipe and data in turn, as in DeepSpeed.
        process_group: all ranks; None: the default group.
        known: groups that exist already, by their ranks; they are used instead of new ones.

    A group that is not known is created when it is first asked for. All its ranks must then ask for it.

    Raises:
        UsageError: there is no process group, or the topology has another number of ranks.
    """

    def __init__(
        self,
        topology: ProcessTopology | None = None,
        process_group: dist.ProcessGroup | None = None,
        known: Mapping[tuple[int, ...], dist.ProcessGroup] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "PipelineParallelGrid: there is no process group; call deepspeed.init_distributed() first"
            )
        self.global_rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self._topo = topology if topology is not None else _factored(self.world_size)
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
        self.p2p_groups = [
            [group[at], group[(at + 1) % len(group)]]
            for group in self._topo.get_axis_comm_lists("pipe")
            for at in range(len(group))
        ]

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

    def _is_grid_valid(self) -> bool:
        """The topology has as many ranks as there are."""
        return self._topo.world_size() == self.world_size

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


def prime_factors(number: int) -> list[int]:
    """The prime factors of a positive number, ascending.

    Raises:
        ValueError: the number is not positive.
    """
    if number <= 0:
        raise ValueError(f"prime_factors({number}): the number must be positive")
    factors, prime = [], 2
    while number > 1:
        while number % prime:
            prime += 1
        factors.append(prime)
        number //= prime
    return factors


def _factored(world_size: int) -> PipeDataParallelTopology:
    """The prime factors of `world_size`, ascending, given to pipe and data in turn."""
    factors = prime_factors(world_size)
    return PipeDataParallelTopology(num_pp=prod(factors[::2]), num_dp=prod(factors[1::2]))


__all__ = ["PipelineParallelGrid", "prime_factors"]
