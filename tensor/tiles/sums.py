"""Sums of what tiles give: outputs and gradients joined along the sequence, gradients of weights added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor


@final
class Joined:
    """One tensor that tiles are copied into, along a dimension. Only one tile exists beside it."""

    def __init__(self, dim: int, ranges: Sequence[tuple[int, int]]) -> None:
        """
        Args:
            ranges: first token and number of tokens of each tile. A tile has as many elements along `dim` as it
                has tokens, or any number that is the same for all tiles.
        """
        self._dim, self._ranges = dim, ranges
        self._at = 0
        self.whole: Tensor | None = None

    def add(self, tile: Tensor) -> None:
        """Copy the next tile."""
        size = tile.shape[self._dim]
        if self.whole is None:
            shape = list(tile.shape)
            (_, first), (start, last) = self._ranges[0], self._ranges[-1]
            shape[self._dim] = start + last if size == first else size * len(self._ranges)
            self.whole = tile.new_empty(shape)
        self.whole.narrow(self._dim, self._at, size).copy_(tile)
        self._at += size


@final
class GradSum:
    """The sum of gradients, in fp32 where they have 16 bits, so that it is rounded once."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._dtype = torch.float32
        self._is_own = False  # autograd may give one tensor as the gradient of several

    def add(self, grad: Tensor | None) -> None:
        """Add the gradient of a tile; None if the tile has none."""
        if grad is None:
            return
        if self._sum is None:
            self._sum, self._dtype = grad, grad.dtype
        elif self._is_own:
            self._sum.add_(grad)
        else:
            wide = self._sum.float() if grad.dtype.itemsize == 2 else self._sum
            self._sum, self._is_own = wide + grad, True

    def total(self) -> Tensor | None:
        """The sum in the dtype of the gradients; None if no tile had one. The sum is forgotten."""
        total, self._sum = self._sum, None
        return None if total is None else total.to(self._dtype)


__all__ = ["GradSum", "Joined"]
