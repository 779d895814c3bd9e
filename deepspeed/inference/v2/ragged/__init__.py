"""`deepspeed.inference.v2.ragged`: the sections of an inference config, for reading; xds has no such engine."""

from __future__ import annotations

from typing import Any

_CONFIGS = ("AllocationMode", "DSStateManagerConfig", "MemoryConfig")


def __getattr__(name: str) -> Any:
    if name in _CONFIGS:
        from . import manager_configs

        return getattr(manager_configs, name)
    from ....missing import placeholder

    return placeholder(__name__, name)
