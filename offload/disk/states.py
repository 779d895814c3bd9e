"""Masters and optimizer states in the file of a rank.

file     | master 0, its states | master 1, its states | ...     one extent for each master
pool     | slot: update 1 | slot: reads 2 | slot: writes 0 |     a slot holds the largest extent
"""

from __future__ import annotations

from pathlib import Path
from typing import final

from torch import Tensor

from ..interfaces import StateStorage, StateStore
from .file_store import FileStore
from .options import DiskOptions, aligned


@final
class DiskStateStore(FileStore, StateStore):
    """Gives each master an extent, sized for the master and `num_states` states."""

    is_on_disk = True

    def __init__(self, folder: Path, options: DiskOptions, rank: int, *, num_states: int) -> None:
        """
        Args:
            folder: `offload_optimizer.nvme_path`.
            num_states: state tensors of the optimizer of a parameter's size. More stay in memory.
        """
        super().__init__(folder, options, rank)
        self._num_states = num_states

    def plan(self, index: int, numel: int, itemsize: int) -> None:
        self._plan(index, aligned(numel * itemsize), 1 + self._num_states)

    def state_storage(self, index: int, master: Tensor, *, holds_master: bool) -> StateStorage:
        return self._state_storage(index, master, holds_master=holds_master)


__all__ = ["DiskStateStore"]
