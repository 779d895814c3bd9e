"""`deepspeed.ops.adam`: DeepSpeed's classes for xds's Adam. They step alone, or `initialize` gets them.

FusedAdam and DeepSpeedCPUAdam are the same here: the engine updates flat shards on their own device.
"""

from __future__ import annotations

from typing import Any

from ...missing import placeholder
from .cpu_adam import DeepSpeedCPUAdam
from .fused_adam import FusedAdam


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
