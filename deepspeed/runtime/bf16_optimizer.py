"""`deepspeed.runtime.bf16_optimizer`: the class of the optimizer in bf16 at stage 0."""

from __future__ import annotations

from typing import Any

from ..missing import placeholder
from .optimizer_kinds import BF16_Optimizer as BF16_Optimizer


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
