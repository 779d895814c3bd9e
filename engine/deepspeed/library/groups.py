"""`deepspeed.utils.groups`: the process groups of the newest engine that `deepspeed.initialize` has made.

Without pipeline stages all ranks are data-parallel ranks.
"""

from __future__ import annotations

from typing import Any, final
from weakref import ReferenceType, ref

import torch.distributed as dist

from ....utils.errors import UsageError
from ..training.topology import PipelineParallelGrid
from .comm import get_world_group


@final
class _Newest:
    """The grid of the newest engine; none once that engine is gone."""

    def __init__(self) -> None:
        self._grid: ReferenceType[PipelineParallelGrid] | None = None
        self.mpu: Any = None  # of `UlyssesSPAttentionHF`

    def follow(self, grid: PipelineParallelGrid | None) -> None:
        self._grid = None if grid is None else ref(grid)

    def grid(self) -> PipelineParallelGrid | None:
        return None if self._grid is None else self._grid()


_newest = _Newest()


def follow(grid: PipelineParallelGrid | None, mpu: Any = None) -> None:
    """From now on answer for the stages of `grid` and the sequence ranks of `mpu`; None: there are none."""
    _newest.follow(grid)
    _newest.mpu = mpu


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks with the same part of the model: all ranks, or those of one pipeline stage."""
    grid = _newest.grid() or _newest.mpu
    if grid is None:
        return get_world_group()
    found: dist.ProcessGroup = grid.get_data_parallel_group()
    return found


def get_data_parallel_world_size() -> int:
    grid = _newest.grid() or _newest.mpu
    return get_world_group().size() if grid is None else int(grid.get_data_parallel_world_size())


def get_data_parallel_rank() -> int:
    grid = _newest.grid() or _newest.mpu
    return get_world_group().rank() if grid is None else int(grid.get_data_parallel_rank())


def get_model_parallel_world_size() -> int:
    """Always 1: tensors are not divided between ranks."""
    return 1


def get_model_parallel_rank() -> int:
    return 0


def _get_sequence_parallel_group() -> dist.ProcessGroup:
    """The ranks that share a sequence.

    Raises:
        UsageError: there are none.
    """
    if _newest.mpu is None:
        raise UsageError(
            "there are no sequence ranks: pass the mpu of UlyssesSPAttentionHF.register_with_transformers to "
            "deepspeed.initialize"
        )
    found: dist.ProcessGroup = _newest.mpu.get_sequence_parallel_group()
    return found


def _get_sequence_parallel_world_size() -> int:
    return 1 if _newest.mpu is None else int(_newest.mpu.get_sequence_parallel_world_size())


def _get_sequence_parallel_rank() -> int:
    return 0 if _newest.mpu is None else int(_newest.mpu.get_sequence_parallel_rank())


_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size


def _get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that share model states: data x sequence ranks."""
    return get_data_parallel_group() if _newest.mpu is None else get_world_group()


def _get_sequence_data_parallel_world_size() -> int:
    return int(_get_sequence_data_parallel_group().size())


def _get_sequence_data_parallel_rank() -> int:
    return int(_get_sequence_data_parallel_group().rank())


get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first of the ranks that hold this rank's slices: itself."""
    return get_world_group().rank()


def _get_data_parallel_group_ranks() -> list[int]:
    return dist.get_process_group_ranks(get_data_parallel_group())


def _get_broadcast_src_rank() -> int:
    """The global rank of the first of those that share model states."""
    return dist.get_process_group_ranks(_get_sequence_data_parallel_group())[0]


def _clone_world_group() -> dist.ProcessGroup:
    """The group of all ranks. (Its global ranks can be asked for, so no clone is needed.)"""
    return get_world_group()
