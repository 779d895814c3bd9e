"""Collectives of a group with one rank: nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ..flat import sum_in_order
from .collectives import (
    ACTIVATION_BUFFER,
    CONTROL_BUFFER,
    Bounds,
    Collectives,
)
from .handles import Done, Handle


@final
class SingleRank(Collectives):
    """Collectives of a single rank: copies only, nothing is sent."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, device, 0, 1)

    def all_gather(self, flat: Tensor, shard: Tensor, *, buffer: int, kind: str) -> Handle:
        if flat.data_ptr() != shard.data_ptr():
            flat.copy_(shard)
        return Done()

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, *, add: bool, buffer: int, kind: str
    ) -> Handle:
        sum_in_order(out, [flat], add=add)
        return Done()

    def collect(
        self, out: Tensor | None, mine: Tensor, bounds: Bounds, *, target: int | None = None
    ) -> None:
        if out is not None:
            out[slice(*bounds[0])] = mine

    def serve(
        self, flat: Tensor | None, shard: Tensor, receivers: Sequence[int], *, buffer: int
    ) -> None:
        if flat is not None:
            flat.copy_(shard)

    def scatter(self, full: Tensor | None, out: Tensor, bounds: Bounds, *, source: int = 0) -> None:
        assert full is not None
        out.copy_(full[slice(*bounds[0])])

    def start_gather_small(
        self, values: Tensor, buffer: int = CONTROL_BUFFER, what: str = ""
    ) -> tuple[Tensor, Handle]:
        return values.unsqueeze(0), Done()

    def send(self, tensor: Tensor, peer: int, *, number: int, what: str, kind: str) -> Handle:
        raise AssertionError("a single rank has no other to send to")

    def receive(self, tensor: Tensor, peer: int, *, number: int, what: str) -> Handle:
        raise AssertionError("a single rank has no other to receive from")

    def all_reduce(
        self, tensor: Tensor, *, what: str, kind: str, buffer: int = ACTIVATION_BUFFER
    ) -> Handle:
        return Done()

    def all_to_all(
        self,
        outs: Sequence[Tensor],
        parts: Sequence[Tensor],
        *,
        what: str,
        kind: str,
        buffer: int = ACTIVATION_BUFFER,
    ) -> Handle:
        outs[0].copy_(parts[0])
        return Done()

    def broadcast(
        self, tensor: Tensor, source: int = 0, what: str = "the first rank's values"
    ) -> None:
        return

    def barrier(self) -> None:
        return
