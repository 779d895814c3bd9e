"""`deepspeed.utils.groups`: process groups. All ranks are data-parallel here."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..comm import get_world_group
from ..missing import placeholder


def get_data_parallel_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    return get_world_group()


def get_data_parallel_world_size() -> int:
    return get_world_group().size()


def get_data_parallel_rank() -> int:
    return get_world_group().rank()


def get_model_parallel_world_size() -> int:
    """Always 1: layers are not divided between ranks."""
    return 1


def get_model_parallel_rank() -> int:
    return 0


_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_data_parallel_group = get_data_parallel_group
_get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_data_parallel_rank = get_data_parallel_rank
_get_sequence_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
