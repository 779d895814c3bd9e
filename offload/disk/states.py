"""Masters and optimizer states in the file of a rank.

file     | master 0, its states | master 1, its states | ...     one extent for each master
ring     | slot: update 1 | slot: reads 2 | slot: writes 0 |     a slot holds the largest extent
"""

from __future__ import annotations

from pathlib import Path
from typing import final

from torch import Tensor

from ..places import Residence, StateHome
from .in_file import InFile
from .options import DiskOptions, aligned


@final
class StatesOnDisk(InFile, StateHome):
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
        region_bytes = aligned(numel * itemsize)
        self._extents.add(str(index), (1 + self._num_states) * region_bytes)

    def residence(self, index: int, master: Tensor, *, holds_master: bool) -> Residence:
        return self._residence(index, master, holds_master=holds_master)


__all__ = ["StatesOnDisk"]
