"""Where an optimizer keeps states of one element, such as a step count: beside its tensors, or on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .shard_optimizer import ShardOptimizer


def scalars_are_beside(optimizer: torch.optim.Optimizer | None, tensor: Tensor) -> bool:
    """Whether states of one element are on the device of the optimizer's `tensor`.

    Optimizers of torch read them on the device only if a group is fused or capturable.
    """
    if isinstance(optimizer, ShardOptimizer):
        return True
    for group in [] if optimizer is None else optimizer.param_groups:
        if any(one is tensor for one in group["params"]):
            return bool(group.get("fused") or group.get("capturable"))
    return False


__all__ = ["scalars_are_beside"]
