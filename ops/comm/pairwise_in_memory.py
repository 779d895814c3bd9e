"""What collectives of ranks that share memory have in common, on one machine and on several."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..watch import Mark
from .collectives import CONTROL_BUFFER, Collectives, PartOf
from .handles import Handle
from .memory.operations import GroupOperations, InMemory
from .memory.peers import Neighbours
from .memory.shared_files import open_shared
from .pairwise import Pairwise
from .shared_flat import SharedFlat


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

    def share(self, numel: int, dtype: torch.dtype, text: str) -> SharedFlat | None:
        gather = partial(self.gather_small, what="memory for shared parameters")
        return open_shared(self.neighbours, self.rank, gather, numel, dtype, text)

    def publish_shared(self, flat: Tensor, *, buffer: int, kind: str) -> Handle:
        mark = self._record("all_gather", kind, buffer, tensor=self.shard_of(flat))
        return self._publish_shared(mark, flat, self._tag(buffer), kind)

    def _publish_shared(self, mark: Mark, flat: Tensor, tag: int, kind: str) -> Handle:
        """See `publish_shared`."""
        self._add_link(kind, 0, 0)
        return self._meet(mark, tag)

    def wait_for_readers(self) -> None:
        mark = self._record("barrier", "barrier", CONTROL_BUFFER, "shared parameters")
        self._meet(mark, self._tag(CONTROL_BUFFER)).wait()

    def _meet(self, mark: Mark, tag: int) -> InMemory:
        """Done when each rank of this machine has started it, with all that it has written before."""
        own = torch.zeros(self.world_size, dtype=torch.uint8)
        return self._memory.all_gather(mark, tag, own, self.shard_of(own))


__all__ = ["PairwiseInMemory"]
