"""`deepspeed.profiling.flops_profiler`: the names of profiler.py."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    profiler = import_module(".profiler", __name__)
    return profiler if name == "profiler" else getattr(profiler, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
