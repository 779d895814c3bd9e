"""`deepspeed.moe`: the functions for models without expert parallelism; layers of experts are stand-ins."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from ..missing import placeholder

    return placeholder(__name__, name)
