"""Which part of a dimension each tensor rank has. Pure arithmetic.

10 heads of 4 over 4 ranks    rank 0: [0, 12)   1: [12, 24)   2: [24, 32)   3: [32, 40)
packed q, k, v of 8 each      rank 0: [0, 4) [8, 12) [16, 20)               rank 1: the rest
"""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]  # [start, stop)


def share_of(units: int, num_ranks: int, rank: int) -> Range:
    """The units of `rank`: consecutive, and the first ranks have one more where they do not divide.

    >>> [share_of(10, 4, rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    least, more = divmod(units, num_ranks)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


def ranges_of(sizes: Sequence[int], units: int, num_ranks: int, rank: int) -> tuple[Range, ...]:
    """The elements of `rank` in a dimension of several packed parts, each cut into `units` equal units.

    Args:
        sizes: of the parts, such as (q, k, v); each is a multiple of `units`.

    >>> ranges_of((8, 4), 4, 2, 1)
    ((4, 8), (10, 12))

    Raises:
        ValueError: a part is no multiple of `units`.
    """
    found, at = [], 0
    for size in sizes:
        if size % units:
            raise ValueError(f"{size} elements cannot be cut into {units} equal units")
        start, stop = share_of(units, num_ranks, rank)
        found.append((at + start * (size // units), at + stop * (size // units)))
        at += size
    return tuple(found)


__all__ = ["Range", "ranges_of", "share_of"]
