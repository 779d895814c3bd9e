"""How the gradient of a unit is reduced over the ranks, and training for compressed weights."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .training.distillation import distillation_loss as distillation_loss
    from .training.reduction import convert_conv1d_to_linear as convert_conv1d_to_linear

# loaded on first use: reading a config imports xds.compression.config and must not import torch
_LOCATIONS = {
    "convert_conv1d_to_linear": ".training.reduction",
    "distillation_loss": ".training.distillation",
}
_provided: dict[str, str] = {}  # by `provide`, once, while the package is imported

__all__ = sorted(_LOCATIONS)


def provide(name: str, module: str) -> None:
    """Export `name` of `module` here: a higher package's, which only the package's root may add."""
    _provided[name] = module


def __getattr__(name: str) -> Any:
    locations = _LOCATIONS | _provided
    if name not in locations:
        raise AttributeError(f"module 'xds.compression' has no attribute {name!r}")
    return getattr(import_module(locations[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LOCATIONS, *_provided])
