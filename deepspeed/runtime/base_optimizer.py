"""`deepspeed.runtime.base_optimizer`: the classes from which optimizers derive."""

from __future__ import annotations

from typing import Any

from ..missing import placeholder
from .optimizer import DeepSpeedOptimizer as DeepSpeedOptimizer
from .optimizer_kinds import ZeROOptimizer as ZeROOptimizer


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
