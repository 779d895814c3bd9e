"""Which sequence ranks exchange heads, and which form a ring over blocks of tokens. Pure arithmetic.

Neighbours have a block of consecutive tokens together, and exchange heads within it. Ranks with the same place
among their neighbours have the same heads, and form a ring:

    4 ranks, 2 heads     block 0: ranks 0 1     rings: 0 2  with the first head
                         block 1: ranks 2 3            1 3  with the second
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from .shares import Range, key_heads, shares

NOTHING: Range = (0, 0)


def num_exchanging(heads: int, world_size: int) -> int:
    """The largest divisor of `world_size` that is at most `heads`.

    >>> num_exchanging(4, 6)
    3
    """
    return max(size for size in range(1, min(heads, world_size) + 1) if world_size % size == 0)


@final
@dataclass(frozen=True)
class Layout:
    """The place of one rank.

    tokens: what each rank has of this rank's block, counted from its start; `NOTHING` in other blocks.
    heads, key_heads: what each rank of the block has in attention; `NOTHING` in other blocks.
    blocks: the tokens of each block in the whole sequence.
    own: the block of this rank.
    ring: the ranks with the same heads, in the order of their blocks.
    """

    tokens: tuple[Range, ...]
    heads: tuple[Range, ...]
    key_heads: tuple[Range, ...]
    blocks: tuple[Range, ...]
    own: int
    ring: tuple[int, ...]

    @property
    def size(self) -> int:
        """The ranks that exchange heads."""
        return len(self.tokens) // len(self.blocks)


def layout_of(tokens: tuple[Range, ...], heads: int, kv_heads: int, rank: int) -> Layout:
    """The layout for `rank`, where each rank has `tokens` of the sequence.

    heads, kv_heads: of queries and of keys, at least one each.
    """
    world_size = len(tokens)
    size = num_exchanging(heads, world_size)
    own, place = divmod(rank, size)
    blocks = tuple(
        (tokens[first][0], tokens[first + size - 1][1]) for first in range(0, world_size, size)
    )
    start = blocks[own][0]
    inside = tuple((a - start, b - start) for a, b in tokens[own * size : (own + 1) * size])

    def only_inside(parts: tuple[Range, ...]) -> tuple[Range, ...]:
        before = (NOTHING,) * (own * size)
        return before + parts + (NOTHING,) * (world_size - len(before) - size)

    return Layout(
        only_inside(inside),
        only_inside(shares(heads, size)),
        only_inside(key_heads(heads, kv_heads, size)),
        blocks,
        own,
        tuple(range(place, world_size, size)),
    )


__all__ = ["NOTHING", "Layout", "layout_of", "num_exchanging"]
