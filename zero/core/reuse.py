"""Stage 3: which units stay gathered from their forward to their backward. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence


def num_kept(numels: Sequence[int], reuse_distance: int, max_live_numel: int) -> int:
    """How many of the last units: those used last in forward are used first in backward.

    Args:
        numels: elements of the units, in the order of forward.
        reuse_distance: at most so many elements may be used between the two uses of a unit.
        max_live_numel: no more units are kept than have so many elements.

    >>> num_kept([10, 10, 10, 10], 25, 1000)
    2
    """
    kept_numel = found = 0
    for numel in reversed(numels):
        if 2 * kept_numel > reuse_distance or kept_numel > max_live_numel:
            break
        kept_numel += numel
        found += 1
    return found


__all__ = ["num_kept"]
