"""`deepspeed.ops.adagrad`: DeepSpeed's class for xds's Adagrad. It steps alone, or `initialize` gets it."""

from __future__ import annotations

from typing import Any

from ...missing import placeholder
from .cpu_adagrad import DeepSpeedCPUAdagrad


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["DeepSpeedCPUAdagrad"]
