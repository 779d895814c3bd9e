"""`deepspeed.runtime.pipe`: coordinates of ranks and instruction lists, for scripts that read them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .coordinates import ProcessTopology as ProcessTopology

_SOURCES = {"ProcessTopology": ".coordinates"}
_MODULES = ("schedule", "topology")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name], __name__), name)
    from ...missing import placeholder

    return placeholder(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_SOURCES, *_MODULES])
