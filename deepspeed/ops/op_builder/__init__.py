"""`deepspeed.ops.op_builder`: DeepSpeed's builders of ops. xds's own ops are built on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_SOURCES = {
    "CUDAOpBuilder": ".builder",
    "OpBuilder": ".builder",
    "builder_names": ".builders",
    "get_default_compute_capabilities": ".builder",
}

__all__ = sorted(_SOURCES)


def __getattr__(name: str) -> Any:
    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name], __name__), name)
    from .builders import BUILDERS

    if name in BUILDERS:
        return BUILDERS[name]
    from ...missing import placeholder

    return placeholder(__name__, name)


def __dir__() -> list[str]:
    from .builders import BUILDERS

    return sorted([*globals(), *_SOURCES, *BUILDERS])
