"""The squared norms of the shards of a flat buffer, for the norm over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ...ops.comm.collectives import Collectives
from ...ops.kernels.square_sum import exact_square_sum, square_sum


@final
@dataclass(frozen=True, eq=False)
class Squares:
    """How the norms of a buffer are computed.

    dtype: of the parameters. sees_all: this rank has the sums of all shards. exact: see `exact_square_sum`.
    """

    collectives: Collectives
    dtype: torch.dtype
    sees_all: bool
    exact: bool

    def of(self, held: Tensor | None, device: torch.device) -> Tensor:
        """The squared norm of each shard in `held`, [world_size] fp64 on `device`; 0 for the others.

        held: all shards, or this rank's; None: nothing.
        """
        compute = exact_square_sum if self.exact else square_sum
        size = self.collectives.world_size
        if held is not None and self.sees_all:
            shards = [self.collectives.shard_of(held, rank) for rank in range(size)]
            found = [compute(shard, self.dtype) for shard in shards]
            return found[0].view(1) if size == 1 else torch.stack(found)
        sums = torch.zeros(size, dtype=torch.float64, device=device)
        if held is not None:
            sums[self.collectives.rank] = compute(held, self.dtype)
        return sums


__all__ = ["Squares"]
