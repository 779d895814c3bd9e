"""`deepspeed.runtime.tensor_parallel`: layers over tensor ranks."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from ...missing import placeholder

    return placeholder(__name__, name)
