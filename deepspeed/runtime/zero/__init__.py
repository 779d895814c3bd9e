"""`deepspeed.runtime.zero`: the same names as `deepspeed.zero`, and the estimators."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...missing import placeholder

_MODULES = ("partition_parameters", "stage3", "stage_1_and_2")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    try:
        return getattr(import_module("xds.deepspeed.zero"), name)
    except AttributeError:
        return placeholder(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
