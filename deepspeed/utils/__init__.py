"""`deepspeed.utils`: logging, whole values of sharded parameters, process groups."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_STATES = (
    *(
        f"safe_{verb}_{part}_{what}"
        for verb in ("get", "set")
        for part in ("full", "local")
        for what in ("fp32_param", "grad", "optimizer_state")
    ),
    "safe_update_full_grad_vectorized",
)
_LEAVES = (
    *("get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "unset_z3_leaf_modules"),
    *("set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix"),
    *("z3_leaf_module", "z3_leaf_parameter"),
)
_SOURCES = {
    **dict.fromkeys(_STATES, ".tensor_fragment"),
    **dict.fromkeys(_LEAVES, ".leaf_modules"),
    "RepeatingLoader": "xds.engine.data.loaders",
    "get_accelerator": "xds.deepspeed.accelerator",
    "log_dist": ".logging",
    "logger": ".logging",
}
_MODULES = ("groups", "logging", "tensor_fragment", "zero_to_fp32")

__all__ = sorted(_SOURCES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name], __name__), name)
    from ..missing import placeholder

    return placeholder(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_SOURCES, *_MODULES])
