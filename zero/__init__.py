"""ZeRO: shards model states over the ranks, and gives user code access to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..utils import exports as _exports

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
# the package's root adds names of higher packages
LOCATIONS = {
    **dict.fromkeys(_FULL, ".access.full"),
    "GatheredParameters": ".access.gathered",
    "load_weights": ".construction.weights",
    "register_external_parameter": ".features.external_params",
}

__all__ = sorted(LOCATIONS)


def __getattr__(name: str) -> Any:
    return _exports.load(__name__, LOCATIONS, name)


def __dir__() -> list[str]:
    return _exports.names(__name__, LOCATIONS)
