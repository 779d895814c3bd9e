"""`optimizer.parameter_offload`: what libraries take off a model of stage 3 while it generates, and put back.

xds gathers by hooks of its own, which find parameters inside `GatheredParameters` whole and leave them alone.
So nothing needs to be taken off: a list has one handle that stands for all of the engine's hooks, and removing
it does nothing. Scripts that count hooks see them come and go, as DeepSpeed's do.
"""

from __future__ import annotations

from collections.abc import ItemsView
from typing import Any, final

from torch import nn

from ....zero.core.gather import Gatherer
from ...missing import placeholder


@final
class Hook:
    """Stands for the engine's hooks."""

    def remove(self) -> None:
        """Does nothing: hooks leave whole parameters alone."""


@final
class ParamCoordinator:
    """The order of units in the last forward, from which the engine knows what to gather early."""

    def __init__(self, gatherer: Gatherer | None) -> None:
        self._gatherer = gatherer
        self._unknown: object = None  # the order of the forward that does not count

    def is_complete_trace(self) -> bool:
        """A forward has run since the start, and since hooks were put back."""
        order = None if self._gatherer is None else self._gatherer.order
        return bool(order) and order is not self._unknown

    def is_invalid_trace(self) -> bool:
        """The next forward finds the order anew."""
        return not self.is_complete_trace()

    def is_record_trace(self) -> bool:
        """Never between two calls of the engine."""
        return False

    def _invalidate_trace(self) -> None:
        self._unknown = None if self._gatherer is None else self._gatherer.order


@final
class DeepSpeedZeRoOffload:
    """The attributes that TRL and scripts with the same lines use, for the model of an engine at stage 3."""

    def __init__(self, module: nn.Module, gatherer: Gatherer | None = None) -> None:
        self.module = module
        self._coordinator = ParamCoordinator(gatherer)
        self.forward_hooks: list[Any] = [Hook()]
        self.backward_hooks: list[Any] = [Hook()]

    def _remove_module_hooks(self) -> None:
        """Empty the lists. The engine's hooks stay."""
        self.forward_hooks, self.backward_hooks = [], []

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Fill the lists again. The engine's hooks were never taken off."""
        self.forward_hooks, self.backward_hooks = [Hook()], [Hook()]
        self._coordinator._invalidate_trace()

    def get_param_coordinator(self) -> ParamCoordinator:
        """Says whether the order in which units are gathered is known."""
        return self._coordinator

    def empty_partition_cache(self) -> None:
        """Does nothing: units are released after each use."""


def external_parameters(module: nn.Module) -> ItemsView[str, nn.Parameter]:
    """`module.ds_external_parameters()`: none, because xds finds uses of another module's parameters itself."""
    none: dict[str, nn.Parameter] = {}
    return none.items()


__all__ = ["DeepSpeedZeRoOffload", "external_parameters"]


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
