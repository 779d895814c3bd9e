"""Which part of a dimension each tensor rank has. Pure arithmetic.

10 heads of 4 over 4 ranks    rank 0: [0, 12)   1: [12, 24)   2: [24, 32)   3: [32, 40)
packed q, k, v of 8 each      rank 0: [0, 4) [8, 12) [16, 20)               rank 1: the rest
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ops.boxes import Range


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
    ranges, begin = [], 0
    for size in sizes:
        if size % units:
            raise ValueError(f"{size} elements cannot be cut into {units} equal units")
        start, stop = share_of(units, num_ranks, rank)
        ranges.append((begin + start * (size // units), begin + stop * (size // units)))
        begin += size
    return tuple(ranges)


def unit_of(units: int, num_ranks: int, rank: int) -> int:
    """The unit of `rank` where there are fewer units than ranks: neighbours have copies of one unit.

    >>> [unit_of(2, 4, rank) for rank in range(4)]
    [0, 0, 1, 1]
    """
    return rank * units // num_ranks


def copied_ranges(
    sizes: Sequence[int], units: int, head: int, num_ranks: int, rank: int
) -> tuple[Range, ...]:
    """As `ranges_of` for fewer units than ranks. Ranks with the same unit share its heads, or all have its one.

    Args:
        head: the elements of a head. Each part of `sizes` has the same number of heads in every unit.

    >>> [copied_ranges([16], 2, 2, 4, rank) for rank in range(4)]  # 8 heads of queries
    [((0, 4),), ((4, 8),), ((8, 12),), ((12, 16),)]
    >>> [copied_ranges([4], 2, 2, 4, rank) for rank in range(4)]  # 2 heads of keys
    [((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)]

    Raises:
        ValueError: a unit has several heads, and fewer than ranks that share it.
    """
    unit = unit_of(units, num_ranks, rank)
    sharing = [other for other in range(num_ranks) if unit_of(units, num_ranks, other) == unit]
    ranges, begin = [], 0
    for size in sizes:
        heads = size // units // head
        start, stop = 0, 1
        if heads > 1:
            if heads < len(sharing):
                raise ValueError(
                    f"{len(sharing)} ranks share {heads} heads of queries of one head of keys"
                )
            start, stop = share_of(heads, len(sharing), sharing.index(rank))
        first = begin + unit * (size // units)
        ranges.append((first + start * head, first + stop * head))
        begin += size
    return tuple(ranges)


__all__ = ["copied_ranges", "ranges_of", "share_of", "unit_of"]
