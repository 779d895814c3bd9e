"""`optimizer.parameter_offload`: what libraries take off a model of stage 3 while it generates, and put back.

xds gathers by hooks of its own, which find parameters inside `GatheredParameters` whole and leave them alone.
So there is nothing to take off: the lists of hooks are empty, and registering does nothing.
"""

from __future__ import annotations

from collections.abc import ItemsView
from typing import Any, final

from torch import nn

from ...missing import placeholder


@final
class DeepSpeedZeRoOffload:
    """The attributes that TRL and scripts with the same lines use, for the model of an engine at stage 3."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Does nothing: the engine's hooks are never taken off."""

    def empty_partition_cache(self) -> None:
        """Does nothing: units are released after each use."""


def external_parameters(module: nn.Module) -> ItemsView[str, nn.Parameter]:
    """`module.ds_external_parameters()`: none, because xds finds uses of another module's parameters itself."""
    none: dict[str, nn.Parameter] = {}
    return none.items()


__all__ = ["DeepSpeedZeRoOffload", "external_parameters"]


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
