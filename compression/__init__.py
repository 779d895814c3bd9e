"""How the gradient of a unit is reduced over the ranks, and training for compressed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..utils import exports as _exports

if TYPE_CHECKING:
    from .training.distillation import distillation_loss as distillation_loss
    from .training.reduction import convert_conv1d_to_linear as convert_conv1d_to_linear

# loaded on first use: reading a config imports xds.compression.config and must not import torch
# the package's root adds names of higher packages
LOCATIONS = {
    "convert_conv1d_to_linear": ".training.reduction",
    "distillation_loss": ".training.distillation",
}

__all__ = sorted(LOCATIONS)


def __getattr__(name: str) -> Any:
    return _exports.load(__name__, LOCATIONS, name)


def __dir__() -> list[str]:
    return _exports.names(__name__, LOCATIONS)
