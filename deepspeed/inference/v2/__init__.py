"""`deepspeed.inference.v2`: small functions that scripts import; xds has no inference engine."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from ...missing import placeholder

    return placeholder(__name__, name)
