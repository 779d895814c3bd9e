"""The backend of a rank that waits for its place in a group: it builds its engine while the others train.

Each peer seems to send what this rank sends, and nothing is sent. That is enough for checks that all ranks
agree. The values come from the others when it has its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from .backend import Backend, Bounds
from .handles import DONE, Handle


@final
class WaitingBackend(Backend):
    """Sends nothing."""

    is_recorded = False

    def all_gather(self, flat: Tensor, shard: Tensor, buffer: int) -> Handle:
        flat.view(self.world_size, -1).copy_(shard.clone())
        return DONE

    def reduce_scatter(self, flat: Tensor, out: Tensor, buffer: int, add: bool) -> Handle:
        return DONE

    def all_reduce(self, tensor: Tensor, buffer: int) -> Handle:
        return DONE

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor], buffer: int) -> Handle:
        for out, part in zip(outs, parts, strict=True):
            out.copy_(part)
        return DONE

    def start_gather_small(self, values: Tensor, buffer: int) -> tuple[Tensor, Handle]:
        return values.expand(self.world_size, -1).clone(), DONE

    def send(self, tensor: Tensor, peer: int) -> Handle:
        return DONE

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        return DONE

    def collect(self, out: Tensor | None, mine: Tensor, bounds: Bounds, target: int | None) -> None:
        if out is not None:
            out[slice(*bounds[self.rank])] = mine

    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], buffer: int
    ) -> None:
        if flat is not None:
            self.shard_of(flat).copy_(shard)

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, source: int) -> None:
        if full is not None:
            out.copy_(full[slice(*bounds[self.rank])])

    def broadcast(self, tensor: Tensor, source: int) -> None:
        return

    def barrier(self) -> None:
        return


__all__ = ["WaitingBackend"]
