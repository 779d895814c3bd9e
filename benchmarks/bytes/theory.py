"""Computes the bytes that one rank must send in one optimizer step, from the sizes of the units.

Ring or pairwise, a collective over N ranks cannot send less than f = (N - 1) / N of the buffer a
rank, so with e bytes an element and P elements (ZeRO paper, section 7):

    stages 0 and 1    2 e P f           reduce once, gather once, whatever the accumulation
    stage 2           (k + 1) e P f     reduce each of the k micro-batches, gather once
    stage 3           k * 3 e P f       gather for forward and for backward, reduce
                      minus k * e P' f  for the units P' that stay gathered in between:
                                        the root, and the last block, which backward needs first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class UnitSize:
    """Elements of a unit; `kept`: it stays gathered from forward to backward at stage 3."""

    numel: int
    kept: bool = False


def passes(stage: int, num_micro_batches: int, kept: bool) -> int:
    """How many times a rank sends the fraction f of a unit's buffer in one optimizer step."""
    if stage <= 1:
        return 2
    if stage == 2:
        return num_micro_batches + 1
    return num_micro_batches * (2 if kept else 3)


def bytes_per_step(
    units: Sequence[UnitSize],
    stage: int,
    world_size: int,
    num_micro_batches: int,
    element_bytes: int = 4,
) -> float:
    """Bytes per rank and step; an integer when every unit divides by `world_size`."""
    fraction = (world_size - 1) / world_size
    elements = sum(u.numel * passes(stage, num_micro_batches, u.kept) for u in units)
    return elements * element_bytes * fraction
