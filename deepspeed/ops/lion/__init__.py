"""`deepspeed.ops.lion`: DeepSpeed's classes for xds's Lion. They step alone, or `initialize` gets them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_SOURCES = {
    "DeepSpeedCPULion": ".cpu_lion",
    "FusedLion": ".fused_lion",
}

__all__ = sorted(_SOURCES)


def __getattr__(name: str) -> Any:
    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name], __name__), name)
    from ...missing import placeholder

    return placeholder(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_SOURCES])
