"""`deepspeed.moe`: gates, and functions for models without expert parallelism; no layers of experts."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from ..missing import placeholder

    return placeholder(__name__, name)
