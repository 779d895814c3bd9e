"""Which tokens and which heads each rank of a sequence group has. Pure arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

Range = tuple[int, int]


def shares(total: int, world_size: int) -> tuple[Range, ...]:
    """`total` things in order over the ranks, as evenly as possible: the first and the end of each rank.

    >>> shares(5, 2)
    ((0, 2), (2, 5))
    """
    return tuple(
        (total * rank // world_size, total * (rank + 1) // world_size) for rank in range(world_size)
    )


def key_heads(heads: int, kv_heads: int, world_size: int) -> tuple[Range, ...]:
    """The heads of keys and values that the query heads of each rank need. Ranges of two ranks may overlap.

    >>> key_heads(4, 1, 2)
    ((0, 1), (0, 1))
    """
    grouped = heads // kv_heads
    return tuple(
        (first // grouped, (end - 1) // grouped + 1) for first, end in shares(heads, world_size)
    )


def key_head_of_each(heads: int, kv_heads: int, own: Range, device: torch.device) -> Tensor:
    """For each query head of `own`, its head of keys among those that the rank received. No host waits.

    >>> key_head_of_each(6, 2, (2, 4), torch.device("cpu"))
    tensor([0, 1])
    """
    grouped = heads // kv_heads
    return torch.arange(*own, device=device) // grouped - own[0] // grouped


__all__ = ["Range", "key_head_of_each", "key_heads", "shares"]
