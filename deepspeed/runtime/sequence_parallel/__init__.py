"""`deepspeed.runtime.sequence_parallel`: long sequences."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = ("parallel_state_sp", "ulysses_sp")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    from ...missing import placeholder

    return placeholder(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
