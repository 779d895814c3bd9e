"""`deepspeed.runtime.fp16.fused_optimizer`: the class of the optimizer in fp16 at stage 0."""

from __future__ import annotations

from typing import Any

from ...missing import placeholder
from ..optimizer_kinds import FP16_Optimizer as FP16_Optimizer


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
