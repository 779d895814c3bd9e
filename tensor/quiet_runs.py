"""Contexts in which a module runs once more without effects on the model."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

Holding = Callable[[nn.Module], AbstractContextManager[None]]
"""Inside, all parameters of a module are there."""


@contextmanager
def alone(region: nn.Module, holding: Holding) -> Iterator[None]:
    """Inside, the modules in `region` have their parameters, and nothing else happens when they run."""
    inner = [module for module in region.modules() if module is not region]
    kept = [(module, module._forward_pre_hooks, module._forward_hooks) for module in inner]
    with holding(region):
        try:
            for module in inner:
                module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
            yield
        finally:
            for module, before, after in kept:
                module._forward_pre_hooks, module._forward_hooks = before, after


def uncompiled() -> AbstractContextManager[None]:
    """Inside, compiled functions run as they were written; a process without a compiler has none."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def without_cache(value: Any) -> Any:
    """None for a cache of keys and values, which another run would let grow; else `value`."""
    return None if hasattr(value, "get_seq_length") and hasattr(value, "update") else value


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, `model` is in evaluation mode; afterwards each module is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


__all__ = ["Holding", "alone", "evaluating", "uncompiled", "without_cache"]
