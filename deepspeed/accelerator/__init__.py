"""`deepspeed.accelerator`: the type of this machine's device, with DeepSpeed's names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_SOURCES = {
    "DeepSpeedAccelerator": ".abstract_accelerator",
    "get_accelerator": ".real_accelerator",
    "is_current_accelerator_supported": ".real_accelerator",
    "set_accelerator": ".real_accelerator",
}

__all__ = sorted(_SOURCES)


def __getattr__(name: str) -> Any:
    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name], __name__), name)
    from ..missing import placeholder

    return placeholder(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_SOURCES])
