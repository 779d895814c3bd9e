"""`deepspeed.moe`: the functions for models without expert parallelism; layers of experts are stand-ins."""

from __future__ import annotations

from typing import Any

from ..missing import placeholder


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
