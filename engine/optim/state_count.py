"""How many state tensors of a parameter's size an optimizer will make, known before it is built.

torch's own classes make their states in the first step, so one step on two numbers is tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.optim.shard_optimizer import ShardOptimizer
from .optimizers import ENGINE_FLAGS, OptimizerSection, own_class

UNKNOWN = 2  # as many as Adam; further states stay in memory
NUMEL = 2  # of the trial: a state of one element would look like a constant


def count_states(section: OptimizerSection | None, given: Any) -> int:
    """State tensors for each parameter.

    Args:
        section: the config's, used if `given` is None.
        given: the script's optimizer, its class, or a callable.
    """
    if given is None:
        assert section is not None
        return _of_section(section)
    if isinstance(given, torch.optim.Optimizer):
        groups = [{k: v for k, v in group.items() if k != "params"} for group in given.param_groups]
        return _of_class(type(given), groups, given.defaults)
    return _of_class(given, [{}], {}) if isinstance(given, type) else UNKNOWN


def _of_section(section: OptimizerSection) -> int:
    own = own_class(section.type, section.params)
    if own is not None:
        return own.num_states
    params = {k: v for k, v in section.params.items() if k not in ENGINE_FLAGS or k == "amsgrad"}
    return _of_class(getattr(torch.optim, section.type), [{}], params)


def _of_class(kind: Any, options: Sequence[Any], params: Mapping[str, Any]) -> int:
    if issubclass(kind, ShardOptimizer):
        return int(kind.num_states)
    if not kind.__module__.startswith("torch.optim"):
        return UNKNOWN  # a constructor of somebody else's may do anything
    weights = [torch.zeros(NUMEL, requires_grad=True) for _ in options]
    entries = [{"params": [w], **group} for w, group in zip(weights, options, strict=True)]
    try:
        optimizer = kind(entries, **params)
        for weight in weights:
            weight.grad = torch.ones(NUMEL)
        optimizer.step()
    except Exception:
        return UNKNOWN  # what is wrong is said where the optimizer is built
    return max(
        (sum(map(_has_values, state.values())) for state in optimizer.state.values()), default=0
    )


def _has_values(state: object) -> bool:
    return isinstance(state, Tensor) and state.numel() == NUMEL


__all__ = ["count_states"]
