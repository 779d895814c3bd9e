"""`deepspeed.sequence`: attention over the tokens of several ranks."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "layer":
        return import_module(".layer", __name__)
    from ..missing import placeholder

    return placeholder(__name__, name)
