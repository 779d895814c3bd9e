"""A box: the slice of a tensor that a rank has, along one dimension. Boxes are cut out, and put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..utils.schema.checked_types import Size

Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True)
class Box:
    """The place of a slice in the tensor that it was cut from.

    whole: the shape of that tensor. The slice has the elements [start, stop) of `ranges` of dimension `dim`,
    in this order, and all elements of the other dimensions.
    """

    whole: tuple[Size, ...]
    dim: Size
    ranges: tuple[tuple[Size, Size], ...]

    @property
    def length(self) -> int:
        """The elements of the slice along `dim`."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the slice."""
        return (*self.whole[: self.dim], self.length, *self.whole[self.dim + 1 :])


Boxes = tuple[Box, ...]  # of one tensor, by rank


def taken(whole: Tensor, box: Box) -> Tensor:
    """The slice of `whole`, as a new contiguous tensor."""
    parts = [whole.narrow(box.dim, start, stop - start) for start, stop in box.ranges]
    return torch.cat(parts, box.dim).contiguous()


def put(whole: Tensor, box: Box, values: Tensor) -> None:
    """Write a slice to its place in `whole`."""
    at = 0
    for start, stop in box.ranges:
        part = values.narrow(box.dim, at, stop - start)
        whole.narrow(box.dim, start, stop - start).copy_(part)
        at += stop - start


def ranks_with_copies(boxes: Sequence[Box], rank: int) -> tuple[int, ...]:
    """The ranks that have what `rank` has, with itself."""
    return tuple(other for other, box in enumerate(boxes) if box == boxes[rank])


__all__ = ["Box", "Boxes", "Range", "put", "ranks_with_copies", "taken"]
