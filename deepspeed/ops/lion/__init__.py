"""`deepspeed.ops.lion`: DeepSpeed's classes for xds's Lion. They step alone, or `initialize` gets them."""

from __future__ import annotations

from typing import Any

from ...missing import placeholder
from .cpu_lion import DeepSpeedCPULion
from .fused_lion import FusedLion


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["DeepSpeedCPULion", "FusedLion"]
