"""The groups of ranks that share a sequence, and of those that share model states."""

from __future__ import annotations

from typing import Any, final

import torch.distributed as dist

from ....utils.errors import UsageError


@final
class UlyssesGroups:
    """What DeepSpeed calls an mpu: the groups of ranks that share a sequence, and of all ranks."""

    def __init__(self, sequence_parallel_size: int, *, cuts_in_eval: bool = True) -> None:
        """A collective of all ranks.

        Args:
            cuts_in_eval: each rank passes a part of the batch after `eval()` as well; else whole batches.
        Raises:
            UsageError: the number of ranks is no multiple of it.
        """
        num_ranks = dist.get_world_size()
        if sequence_parallel_size < 1 or num_ranks % sequence_parallel_size:
            raise UsageError(
                f"sequence_parallel_size = {sequence_parallel_size}: {num_ranks} ranks are no multiple of it; "
                "start another number of ranks"
            )
        self._size = sequence_parallel_size
        self.cuts_in_eval = cuts_in_eval
        rank = dist.get_rank()
        first = rank - rank % sequence_parallel_size
        self._group: Any = None
        for start in range(0, num_ranks, sequence_parallel_size):
            group = dist.new_group(list(range(start, start + sequence_parallel_size)))
            self._group = group if start == first else self._group
        self._data: Any = None
        for place in range(sequence_parallel_size):
            group = dist.new_group(list(range(place, num_ranks, sequence_parallel_size)))
            self._data = group if place == rank % sequence_parallel_size else self._data

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        found: dist.ProcessGroup = self._group
        return found

    def get_sequence_parallel_world_size(self) -> int:
        return self._size

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank() % self._size

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        return dist.group.WORLD

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks with the same tokens of other batches."""
        found: dist.ProcessGroup = self._data
        return found

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self._size

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self._size

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


__all__ = ["UlyssesGroups"]
