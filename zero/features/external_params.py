"""Finds parameters used outside of their unit in the first forwards, and gathers them for later uses.

class Model:                                 self.blocks[0].weight belongs to unit blocks.0, which is
    def forward(self, x):                    dropped when the model's own code uses it: the mode sees
        x = self.blocks[0](x)                the call and gathers blocks.0. From then on blocks.0 is
        return x @ self.blocks[0].weight     gathered whenever the root unit runs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...utils.errors import UsageError
from ..core.gather import Gatherer
from ..core.owners import find_owner
from ..core.unit import Unit

# attributes of a parameter that do not need its values
_ATTRIBUTES = (
    *("shape", "dtype", "device", "requires_grad", "grad_fn", "is_meta", "grad", "layout", "ndim"),
    *(
        "is_leaf",
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "itemsize",
        "nbytes",
    ),
    *("is_mkldnn", "is_mps", "is_xla", "is_xpu", "names", "retains_grad", "_version", "output_nr"),
)
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(Tensor, name)),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_, Tensor.element_size),
    *(torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__hash__, Tensor.is_same_size),
}


def touched_params(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[nn.Parameter]:
    """Parameters among the arguments, also in lists; none if `func` does not read values."""
    if func in _METADATA:
        return
    for value in (*args, *kwargs.values()):
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, nn.Parameter):
                    yield item


# of training, and of evaluation: seeing every call costs a few microseconds each
CHECKED_FORWARDS = 2


@final
class ExternalParams(TorchFunctionMode):
    """A mode that finds uses of parameters outside of their unit in the torch calls of a forward."""

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
            # even if it is gathered now: it may be dropped before backward
            if not _is_overridden(param):
                running = self._gatherer.running
                user = running[-1] if running else self._root
                self._gatherer.register_use(unit, user, is_found=True)
        return func(*args, **kwargs)


def _is_overridden(param: nn.Parameter) -> bool:
    owner = find_owner(param)
    return owner is not None and owner.is_overridden(param)


def register_external_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Declare that calls of `module` use `param` of another unit, so that it is gathered. For all ranks.

    Rarely needed: the first forwards find such uses. Before `xds.initialize` it does nothing.

    Raises:
        UsageError: `module` is not part of the engine's model.
    """
    owner = find_owner(param)
    if owner is not None and not owner.register_use(param, module):
        raise UsageError(
            f"register_external_parameter({type(module).__name__}, {owner.name_of(param)}): the module is "
            "not part of the engine's model; pass the module whose forward uses the parameter"
        )


__all__ = ["CHECKED_FORWARDS", "ExternalParams", "register_external_parameter", "touched_params"]
