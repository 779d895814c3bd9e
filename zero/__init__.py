"""ZeRO: shards model states over the ranks, and gives user code access to them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .access.full import get_full_grad as get_full_grad
    from .access.full import get_full_optimizer_state as get_full_optimizer_state
    from .access.full import get_full_param as get_full_param
    from .access.full import safe_get_full_fp32_param as safe_get_full_fp32_param
    from .access.full import safe_get_full_grad as safe_get_full_grad
    from .access.full import safe_get_full_optimizer_state as safe_get_full_optimizer_state
    from .access.full import safe_set_full_fp32_param as safe_set_full_fp32_param
    from .access.full import safe_set_full_grad as safe_set_full_grad
    from .access.full import safe_set_full_optimizer_state as safe_set_full_optimizer_state
    from .access.full import set_full_grad as set_full_grad
    from .access.full import set_full_optimizer_state as set_full_optimizer_state
    from .access.full import set_full_param as set_full_param
    from .access.gathered import GatheredParameters as GatheredParameters
    from .construction.weights import load_weights as load_weights
    from .features.external_params import register_external_parameter as register_external_parameter

_FULL = tuple(
    f"{prefix}{verb}_full_{what}"
    for prefix in ("", "safe_")
    for verb in ("get", "set")
    for what in ("grad", "optimizer_state", "fp32_param" if prefix else "param")
)
# loaded on first use: reading a config imports xds.zero.config and must not import torch
_LOCATIONS = {
    **dict.fromkeys(_FULL, ".access.full"),
    "GatheredParameters": ".access.gathered",
    "load_weights": ".construction.weights",
    "register_external_parameter": ".features.external_params",
}
_provided: dict[str, str] = {}  # by `provide`, once, while the package is imported

__all__ = sorted(_LOCATIONS)


def provide(name: str, module: str) -> None:
    """Export `name` of `module` here: a higher package's, which only the package's root may add."""
    _provided[name] = module


def __getattr__(name: str) -> Any:
    locations = _LOCATIONS | _provided
    if name not in locations:
        raise AttributeError(f"module 'xds.zero' has no attribute {name!r}")
    return getattr(import_module(locations[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LOCATIONS, *_provided])
