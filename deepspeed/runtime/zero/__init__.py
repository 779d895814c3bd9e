"""`deepspeed.runtime.zero`: the same names as `deepspeed.zero`, and the estimators."""

from __future__ import annotations

from typing import Any

from ...missing import placeholder


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
