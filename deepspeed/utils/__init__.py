"""`deepspeed.utils`: logging, whole values of sharded parameters, process groups."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FULL = tuple(
    f"safe_{verb}_full_{what}"
    for verb in ("get", "set")
    for what in ("fp32_param", "grad", "optimizer_state")
)
_SOURCES = {
    **dict.fromkeys(_FULL, "xds.zero.access.full"),
    "RepeatingLoader": "xds.engine.data.loaders",
    "get_accelerator": "xds.deepspeed.accelerator",
    "log_dist": ".logging",
    "logger": ".logging",
    "get_z3_leaf_modules": ".leaf_modules",
    "set_z3_leaf_modules": ".leaf_modules",
    "unset_z3_leaf_modules": ".leaf_modules",
    "z3_leaf_module": ".leaf_modules",
}
_MODULES = ("groups", "logging", "zero_to_fp32")

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
