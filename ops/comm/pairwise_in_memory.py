"""What collectives of ranks that share memory have in common, on one machine and on several."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Collectives, PartOf
from .memory.operations import GroupOperations
from .memory.peers import Neighbours
from .pairwise import Pairwise


class PairwiseInMemory(Pairwise):
    """Pairwise collectives of a group of which this rank shares memory with its neighbours."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        neighbours: Neighbours,
        timeout_seconds: float,
        part_of: PartOf | None = None,
        successor_of: Collectives | None = None,
    ) -> None:
        super().__init__(group, device, part_of, successor_of)
        self.neighbours = neighbours
        self._memory = GroupOperations(neighbours, self._watch, self._ranks, timeout_seconds)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        if device is not None and device.type != "cpu":
            return super().empty(numel, dtype, device)
        return self.neighbours.segment.empty(numel, dtype)


__all__ = ["PairwiseInMemory"]
