"""`deepspeed.module_inject`: which layers of a model are divided, for reading; xds has its own plans."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from ..missing import placeholder

    return placeholder(__name__, name)
