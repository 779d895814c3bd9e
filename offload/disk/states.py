"""Masters and optimizer states in the file of a rank.

file     | master 0, its states | master 1, its states | ...     one extent for each master
ring     | slot: update 1 | slot: reads 2 | slot: writes 0 |     a slot holds the largest extent
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import final

from torch import Tensor

from ...utils.errors import XdsError
from ..states import Residence, StateHome
from .extents import Extents
from .kept import Kept
from .options import DiskOptions, aligned
from .residence import OnDisk
from .transfers import Transfers


@final
class StatesOnDisk(StateHome):
    """Gives each master an extent, sized for the master and `num_states` states."""

    is_on_disk = True

    def __init__(self, folder: Path, options: DiskOptions, rank: int, *, num_states: int) -> None:
        """
        Args:
            folder: `offload_optimizer.nvme_path`.
            num_states: state tensors of the optimizer of a parameter's size. More stay in memory.
        """
        self._folder = folder
        self._options = options
        self._rank = rank
        self._num_states = num_states
        self._extents = Extents()
        self._transfers = Transfers()
        self._kept = Kept()
        self._residences: list[OnDisk] = []

    def plan(self, index: int, numel: int, itemsize: int) -> None:
        region_bytes = aligned(numel * itemsize)
        self._extents.add(str(index), (1 + self._num_states) * region_bytes)

    def open(self) -> None:
        self._transfers.open(self._folder, self._options, self._rank, self._extents)

    def residence(self, index: int, master: Tensor, *, holds_master: bool) -> Residence:
        extent = self._extents[str(index)]
        found = OnDisk(self._transfers, self._kept, extent, master, holds_master=holds_master)
        self._residences.append(found)
        return found

    def hold(self) -> AbstractContextManager[None]:
        return self._kept.hold()

    def failure(self) -> str:
        for residence in self._residences:
            with suppress(XdsError):
                residence.check_written()
        return self._transfers.failure()

    @property
    def host_bytes(self) -> int:
        return self._transfers.ring_bytes + self._kept.memory_bytes

    def close(self) -> None:
        self._transfers.close()


__all__ = ["StatesOnDisk"]
