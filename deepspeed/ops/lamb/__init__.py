"""`deepspeed.ops.lamb`: DeepSpeed's class for xds's LAMB. It steps alone, or `initialize` gets it."""

from __future__ import annotations

from typing import Any

from ...missing import placeholder
from .fused_lamb import FusedLamb


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["FusedLamb"]
