"""Parameters used outside of their unit: found in the first forwards, gathered for their user ever after.

class Model:                                 self.blocks[0].weight belongs to unit blocks.0, which is
    def forward(self, x):                    empty again when the model's own code uses it: the call is
        x = self.blocks[0](x)                seen, blocks.0 is gathered, and becomes a guest of the root
        return x @ self.blocks[0].weight     unit, gathered whenever that one runs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import nn
from torch.overrides import TorchFunctionMode

from ...utils.errors import UsageError
from ..access.owners import find_owner
from .gather import Gatherer
from .touched import touched_params
from .unit import Unit

CHECKED_FORWARDS = (
    2  # of training, and of evaluation: seeing every call costs a few microseconds each
)


@final
class OutsideUse(TorchFunctionMode):
    """Sees every torch call of a forward."""

    def __init__(self, gatherer: Gatherer, unit_of: Mapping[int, Unit], root: Unit) -> None:
        super().__init__()
        self._gatherer = gatherer
        self._unit_of = unit_of
        self._root = root

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for param in touched_params(func, args, kwargs):
            unit = self._unit_of.get(id(param))
            if unit is None or unit.is_running or not unit.may_be_resharded:
                continue
            if not _is_overridden(
                param
            ):  # gathered or not: by the time of a backward it may be dropped
                running = self._gatherer.running
                self._gatherer.register_use(unit, running[-1] if running else self._root)
        return func(*args, **kwargs)


def _is_overridden(param: nn.Parameter) -> bool:
    owner = find_owner(param)
    return owner is not None and owner.is_overridden(param)


def register_external_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Calls of `module` use `param`, which another unit holds: gather that one for them, too. For all ranks.

    Seldom needed: such uses are found in the first forwards. Before `xds.initialize` it does nothing.
    Raises:
        UsageError: `module` is not part of the engine's model.
    """
    owner = find_owner(param)
    if owner is not None and not owner.register_use(param, module):
        raise UsageError(
            f"register_external_parameter({type(module).__name__}, {owner.name_of(param)}): the module is "
            "not part of the engine's model; pass the module whose forward uses the parameter"
        )


__all__ = ["CHECKED_FORWARDS", "OutsideUse", "register_external_parameter"]
