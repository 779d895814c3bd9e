"""The process's rank, process group and device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .process import join as join
    from .process import local_rank as local_rank
    from .process import pick_device as pick_device

__all__ = ["join", "local_rank", "pick_device"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".process", __name__), name)  # the launcher must not import torch
