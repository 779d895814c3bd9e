"""The bytes that a rank sends for a flat buffer in one step. Pure arithmetic.

With n ranks in the group of the buffer and its shard of s bytes, a reduction and a gather send (n - 1) s each.
Kinds are those of `engine.bytes_sent()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ...zero.core.building import PlannedFlat

REDUCE, GATHER = "reduce_scatter", "all_gather"


@final
@dataclass(frozen=True)
class Repeats:
    """How often a buffer of a unit is sent in one step.

    reductions: of gradients that do not belong to the root unit.
    root_reductions: of those that do.
    gathers: of the parameters of this unit, at stage 3.
    """

    reductions: int
    root_reductions: int
    gathers: int


def reduced_bytes(flat: PlannedFlat, repeats: Repeats) -> int:
    """Bytes of gradients that one rank sends."""
    if not flat.trains:
        return 0
    times = repeats.reductions if flat.unit else repeats.root_reductions
    if flat.group.is_shared:
        times = 1
    size = flat.group.policy.sent_dtype(flat.dtype).itemsize
    return _to_others(flat) * size * times


def gathered_bytes(flat: PlannedFlat, repeats: Repeats, persistent_numel: int) -> int:
    """Bytes of parameters that one rank sends; at stage 0 of sums of gradients.

    persistent_numel: see `flat_bytes`.
    """
    policy = flat.group.policy
    if policy.shards_params:
        stays = flat.is_single or flat.unit_numel <= persistent_numel
        times = (1 if flat.trains else 0) if stays else repeats.gathers
        return _to_others(flat) * flat.dtype.itemsize * times
    if policy.shards_optimizer:
        return _to_others(flat) * flat.dtype.itemsize
    wide = policy.sum_dtype(flat.dtype)
    return _to_others(flat) * (wide if policy.holds_grads else flat.dtype).itemsize


def _to_others(flat: PlannedFlat) -> int:
    """Elements of a shard, once for every other rank."""
    return (flat.group.collectives.world_size - 1) * flat.layout.shard_numel


__all__ = ["GATHER", "REDUCE", "Repeats", "gathered_bytes", "reduced_bytes"]
