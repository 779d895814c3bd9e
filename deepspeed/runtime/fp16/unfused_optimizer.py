"""`deepspeed.runtime.fp16.unfused_optimizer`: the class of the optimizer in fp16 at stage 0 with LAMB."""

from __future__ import annotations

from typing import Any

from ...missing import placeholder
from ..optimizer_kinds import FP16_UnfusedOptimizer as FP16_UnfusedOptimizer


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
