"""`deepspeed.ops.adam`: DeepSpeed's classes for xds's Adam. They step alone, or `initialize` gets them.

FusedAdam and DeepSpeedCPUAdam are the same here: the engine updates flat shards on their own device.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_SOURCES = {
    "DeepSpeedCPUAdam": ".cpu_adam",
    "FusedAdam": ".fused_adam",
}

__all__ = sorted(_SOURCES)


def __getattr__(name: str) -> Any:
    if name in _SOURCES:
        return getattr(import_module(_SOURCES[name], __name__), name)
    from ...missing import placeholder

    return placeholder(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_SOURCES])
