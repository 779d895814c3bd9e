"""`deepspeed.profiling`: the flops profiler."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "flops_profiler":
        return import_module(".flops_profiler", __name__)
    from ..missing import placeholder

    return placeholder(__name__, name)
