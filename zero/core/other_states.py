"""The optimizer's states of other parameters: they show keys and dtypes where a rank has no part of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.optim.shard_optimizer import ShardOptimizer, states_of


def states_of_others(
    optimizer: torch.optim.Optimizer, own: Sequence[Tensor], master: Tensor, group: int
) -> dict[str, Any] | None:
    """States for a parameter of hyperparameter group `group`, without elements; None before the first step.

    First those of the same group: an optimizer may keep other states for other groups.

    Args:
        own: the optimizer's tensors in `master`, whose states are returned as they are.
    """
    states = states_of(optimizer)
    alike = {id(tensor) for tensor in optimizer.param_groups[group]["params"]}
    order = sorted([*own, *states], key=lambda tensor: id(tensor) not in alike)
    found = next((tensor for tensor in order if states.get(tensor)), None)
    if found is None:
        return None
    if id(found) not in alike and isinstance(optimizer, ShardOptimizer):
        keys = optimizer.state_keys(optimizer.param_groups[group])
        if keys is not None:
            return dict.fromkeys(keys, master.new_empty(0))
    if any(tensor is found for tensor in own):
        state: dict[str, Any] = states[found]
        return state
    return {
        key: master.new_empty(0) if isinstance(value, Tensor) and value.dim() else value
        for key, value in states[found].items()
    }


__all__ = ["states_of_others"]
