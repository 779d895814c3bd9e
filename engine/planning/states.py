"""The bytes of model states that a flat buffer takes on one rank, between two steps. Pure arithmetic.

The kinds are those of `engine.memory_plan()`:

    param       the parameters, or this rank's shard of them at stage 3
    grad        gradients that stay allocated from step to step
    master      fp32 copies of 16-bit parameters
    optimizer   states of the optimizer
    gathered    whole parameters at stage 3 that are never dropped; `memory_plan` has them in "buckets"
    host, disk  what is offloaded
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import final

from ...zero.core.building import PlannedFlat
from ...zero.core.groups import buffer_of
from ...zero.core.policy import master_dtype

STATE_KINDS = ("param", "grad", "master", "optimizer", "gathered", "host", "disk")


@final
@dataclass(frozen=True)
class OptimizerStates:
    """What an optimizer keeps of a buffer: `num_states` tensors of the master's size, `constant_bytes`."""

    num_states: int
    constant_bytes: int


@final
@dataclass(frozen=True)
class Places:
    """Where states are: "" is the device, else "host" or "disk".

    params: of shards at stage 3. states: of masters and optimizer states of one flat buffer.
    """

    params: str = ""
    states: str = ""


def flat_bytes(
    flat: PlannedFlat,
    optimizer: OptimizerStates,
    places: Places,
    persistent_numel: int = 0,
    num_holders: int = 1,
) -> Counter[str]:
    """Bytes by kind.

    Args:
        persistent_numel: stage 3: a unit of at most so many elements stays gathered.
        num_holders: so many ranks have the parameters in common, where they are whole.
    """
    policy, layout, size = flat.group.policy, flat.layout, flat.dtype.itemsize
    found: Counter[str] = Counter()
    if policy.shards_params:
        found[places.params or "param"] += layout.shard_numel * size
        if flat.is_single or flat.unit_numel <= persistent_numel:
            found["gathered"] += layout.numel * size
    else:
        found["param"] += layout.numel * size // num_holders
    if flat.trains:
        found["grad"] += 0 if places.states else grad_bytes(flat)
        found.update(_states(flat, optimizer, places))
    return +found


def grad_bytes(flat: PlannedFlat) -> int:
    """Bytes of gradients of a trained buffer that stay allocated, where they stay on the device."""
    policy, layout = flat.group.policy, flat.layout
    wide, narrow = policy.sum_dtype(flat.dtype).itemsize, flat.dtype.itemsize
    if flat.group.collectives.world_size == 1:
        return 0 if policy.shards_grads else layout.numel * wide
    if policy.shards_grads:
        return layout.shard_numel * wide
    if policy.holds_grads or policy.sum_dtype(flat.dtype) == flat.dtype:
        return layout.numel * wide  # the sum over ranks is a part of it
    return layout.numel * narrow + layout.shard_numel * wide


def _states(flat: PlannedFlat, optimizer: OptimizerStates, places: Places) -> Counter[str]:
    policy, layout = flat.group.policy, flat.layout
    wide = master_dtype(flat.dtype)
    numel = layout.shard_numel if policy.shards_optimizer else layout.numel
    params_away = policy.shards_params and bool(places.params)
    is_apart = flat.dtype != wide or params_away != bool(places.states) or places.params == "disk"
    sender = flat.group.legs.sender(buffer_of(layout, 0, flat.dtype, flat.group))
    is_apart = is_apart or (policy.shards_optimizer and sender.keeps_master)
    start, stop = layout.shard_range(0) if policy.shards_optimizer else (0, layout.numel)
    items = len(layout.segments_in(start, stop))
    found: Counter[str] = Counter()
    found[places.states or "master"] += numel * wide.itemsize * is_apart
    kept = optimizer.num_states * numel * wide.itemsize + optimizer.constant_bytes * items
    found[places.states or "optimizer"] += kept
    return found


__all__ = ["STATE_KINDS", "OptimizerStates", "Places", "flat_bytes", "grad_bytes"]
