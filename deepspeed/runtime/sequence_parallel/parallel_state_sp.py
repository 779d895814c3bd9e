"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: the sequence ranks of this process, as functions.

They are those of the newest `initialize_sequence_parallel` or `register_with_transformers`. The module is also
an mpu for `deepspeed.initialize`.
"""

from __future__ import annotations

from typing import Any, final

import torch.distributed as dist

from ....utils.errors import UsageError
from ...errors import raises_theirs
from ...missing import placeholder
from .ulysses_groups import UlyssesGroups


@final
class _State:
    groups: UlyssesGroups | None = None


def remember(groups: UlyssesGroups | None) -> None:
    """From now on answer for these `UlyssesGroups`."""
    _State.groups = groups


@raises_theirs
def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Make the groups. A collective of all ranks.

    Raises:
        UsageError: the number of ranks is no multiple of it, or it is below 2.
    """
    if sequence_parallel_size < 2:
        raise UsageError(f"sequence_parallel_size = {sequence_parallel_size}: must be at least 2")
    remember(UlyssesGroups(sequence_parallel_size))


def _release_sequence_parallel_groups() -> None:
    remember(None)


@raises_theirs
def _known() -> UlyssesGroups:
    if _State.groups is None:
        raise UsageError(
            "there are no sequence ranks: call initialize_sequence_parallel or "
            "UlyssesSPAttentionHF.register_with_transformers first"
        )
    return _State.groups


def get_sequence_parallel_group() -> dist.ProcessGroup:
    return _known().get_sequence_parallel_group()


def get_sequence_parallel_world_size() -> int:
    return _known().get_sequence_parallel_world_size()


def get_sequence_parallel_rank() -> int:
    return _known().get_sequence_parallel_rank()


def get_sequence_data_parallel_group() -> dist.ProcessGroup | None:
    """All ranks."""
    return _known().get_sequence_data_parallel_group()


def get_sequence_data_parallel_world_size() -> int:
    return _known().get_sequence_data_parallel_world_size()


def get_sequence_data_parallel_rank() -> int:
    return _known().get_sequence_data_parallel_rank()


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks with the same tokens of other batches."""
    return _known().get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    return _known().get_data_parallel_world_size()


def get_data_parallel_rank() -> int:
    return _known().get_data_parallel_rank()


get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_rank = get_sequence_parallel_rank


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
