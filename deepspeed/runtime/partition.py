"""Cuts of `deepspeed.runtime.utils`: lists of layers into stages, tensors over a process group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf, prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.errors import UsageError


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """The sum of all weights up to each one, with it."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Borders of `num_parts` parts of equal length, `num_parts` + 1 numbers; the first parts take the rest."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    length, rest = divmod(num_items, num_parts)
    return [part * length + min(part, rest) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Borders of parts whose sums differ little: heaviest minus lightest part is small.

    Dynamic programming over (number of parts, items in them), which keeps one best cut of each.
    """
    num_items = len(weights)
    if num_items <= num_parts:
        return partition_uniform(num_items, num_parts)
    sums = [0.0, *accumulate(weights)]
    # of the first i items in so many parts: (difference, heaviest, lightest, border before the last part)
    rows: list[list[tuple[float, float, float, int]]] = [
        [(0.0, 0.0, inf, 0)] + [(inf, inf, 0.0, 0)] * num_items
    ]
    for part in range(1, num_parts + 1):
        before = rows[-1]
        row = [(inf, inf, 0.0, 0)] * (num_items + 1)
        for end in range(part, num_items + 1):
            found = row[end]
            for start in range(part - 1, end):
                last = sums[end] - sums[start]
                most, least = max(before[start][1], last), min(before[start][2], last)
                if most - least <= found[0]:
                    found = (most - least, most, least, start)
            row[end] = found
        rows.append(row)
    borders = [num_items]
    for row in reversed(rows[1:]):
        borders.append(row[borders[-1]][3])
    return borders[::-1]


@final
class PartitionedTensor:
    """A rank's part of a flattened tensor that all ranks of a group have whole.

    Args:
        tensor: the whole tensor, equal on every rank.
        group: the ranks that get a part each.
    """

    def __init__(
        self, tensor: Tensor, group: dist.ProcessGroup, partition_meta: Any = None
    ) -> None:
        self.group = group
        self.num_parts = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.orig_size = list(tensor.size())
        self.orig_device: Any = tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        start, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[start:end].clone()

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: dist.ProcessGroup, device: Any = None
    ) -> PartitionedTensor:
        """The part that `to_meta` and `data` describe.

        Raises:
            UsageError: it is that of another rank, or another number of ranks.
        """
        num_dims, *rest = meta.tolist()
        size, (num_parts, rank), borders = (
            rest[:num_dims],
            rest[num_dims:][:2],
            rest[num_dims + 2 :],
        )
        made = cls(local_part.new_empty(0), group)
        if (num_parts, rank) != (made.num_parts, made.rank):
            raise UsageError(
                f"PartitionedTensor.from_meta: the part is that of rank {rank} of {num_parts}, and this is "
                f"rank {made.rank} of {made.num_parts}"
            )
        made.orig_size, made.partition = size, borders
        made.orig_device = local_part.device if device is None else device
        made.local_data = local_part.detach()
        return made

    def full(self, device: Any = None) -> Tensor:
        """The whole tensor, from the parts of all ranks. A collective: sends every part to every rank."""
        lengths = [end - start for start, end in pairwise(self.partition)]
        padded = self.local_data.new_zeros(max(lengths))
        padded[: self.local_data.numel()] = self.local_data
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self.group)
        whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        return whole.view(self.orig_size).to(self.orig_device if device is None else device)

    def to_meta(self) -> Tensor:
        """int64: number of dimensions, sizes, number of parts, rank, borders."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def data(self) -> Tensor:
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.size()

    def full_size(self) -> list[int]:
        return self.orig_size

    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.orig_size)


__all__ = ["PartitionedTensor", "partition_balanced", "partition_uniform", "prefix_sum_inc"]
