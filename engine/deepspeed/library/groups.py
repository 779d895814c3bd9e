"""`deepspeed.utils.groups`: the process groups of the newest engine of `deepspeed.initialize` that trains.

Without pipeline stages all ranks are data-parallel ranks.
"""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, ref

import torch.distributed as dist

from ....utils.errors import UsageError
from .comm import get_world_group

NO_SEQUENCE_RANKS = (
    "there are no sequence ranks: pass the mpu of UlyssesSPAttentionHF.register_with_transformers to "
    "deepspeed.initialize"
)


# The adapters, as long as the script has them. DeepSpeed's functions have no engine among their arguments.
_engines: list[ReferenceType[Any]] = []


def follow(engine: Any) -> None:
    """From now on answer for the `grid` and the `sequence_groups` of this engine, until it ends."""
    _engines[:] = [one for one in _engines if one() is not None] + [ref(engine)]


def _newest() -> Any:
    """The newest engine that is not destroyed; where all are, the newest of these. None: there is none."""
    living = [engine for one in reversed(_engines) if (engine := one()) is not None]
    return next(
        (engine for engine in living if not engine.internals.is_destroyed), next(iter(living), None)
    )


def _sequence_groups() -> Any:
    engine = _newest()
    return None if engine is None else engine.sequence_groups


def _data_groups() -> Any:
    """What has the groups of data ranks; None: there are no stages and no sequence ranks."""
    engine = _newest()
    return None if engine is None else engine.mpu or engine.sequence_groups


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks with the same part of the model: all ranks, or those of one pipeline stage."""
    groups = _data_groups()
    if groups is None:
        return get_world_group()
    found: dist.ProcessGroup = groups.get_data_parallel_group()
    return found


def get_data_parallel_world_size() -> int:
    groups = _data_groups()
    return (
        get_world_group().size() if groups is None else int(groups.get_data_parallel_world_size())
    )


def get_data_parallel_rank() -> int:
    groups = _data_groups()
    return get_world_group().rank() if groups is None else int(groups.get_data_parallel_rank())


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
    groups = _sequence_groups()
    if groups is None:
        raise UsageError(NO_SEQUENCE_RANKS)
    found: dist.ProcessGroup = groups.get_sequence_parallel_group()
    return found


def _get_sequence_parallel_world_size() -> int:
    groups = _sequence_groups()
    return 1 if groups is None else int(groups.get_sequence_parallel_world_size())


def _get_sequence_parallel_rank() -> int:
    groups = _sequence_groups()
    return 0 if groups is None else int(groups.get_sequence_parallel_rank())


_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size


def _get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that share model states: data x sequence ranks."""
    return get_data_parallel_group() if _sequence_groups() is None else get_world_group()


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
