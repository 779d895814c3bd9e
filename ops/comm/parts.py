"""Equal tensors in parts: each rank of a group keeps or sends its share, and the whole is put together later.

rank 0  |a a|      rank 1  |b b|      joined on both  |a a b b|
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ..flat import cut
from .collectives import Collectives


@final
class EqualParts:
    """Cuts tensors that all ranks of a group have. `kind`: of the bytes that joining sends."""

    def __init__(self, group: Collectives, kind: str) -> None:
        self._group = group
        self._kind = kind

    def are_used(self, shape: Sequence[int]) -> bool:
        """A tensor of this shape has an element for each rank; a smaller one stays whole."""
        return torch.Size(shape).numel() >= self._group.world_size

    def numel_of(self, numel: int) -> int:
        """Elements of this rank's part."""
        start, stop = cut(numel, self._group.world_size)[self._group.rank]
        return stop - start

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's part, a new tensor [n]."""
        start, stop = cut(tensor.numel(), self._group.world_size)[self._group.rank]
        return tensor.detach().reshape(-1)[start:stop].clone()

    def joined(self, part: Tensor, shape: Sequence[int], what: str) -> Tensor:
        """The whole tensor. `what`: for messages. Sends the part to every other rank of the group."""
        ranges = cut(torch.Size(shape).numel(), self._group.world_size)
        whole = part.new_empty(ranges[-1][1])
        outs = [whole[start:stop] for start, stop in ranges]
        parts = [part] * len(ranges)
        self._group.all_to_all(outs, parts, what=what, kind=self._kind).wait()
        return whole.view(tuple(shape))


__all__ = ["EqualParts"]
