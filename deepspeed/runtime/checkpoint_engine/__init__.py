"""`deepspeed.runtime.checkpoint_engine`: writers of single files, for scripts that save with them."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from ...missing import placeholder

    return placeholder(__name__, name)
