"""`deepspeed.accelerator`: the type of this machine's device, with DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from ..missing import placeholder
from .abstract_accelerator import DeepSpeedAccelerator
from .real_accelerator import get_accelerator, is_current_accelerator_supported, set_accelerator


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = [
    "DeepSpeedAccelerator",
    "get_accelerator",
    "is_current_accelerator_supported",
    "set_accelerator",
]
