"""`deepspeed.launcher`: the functions of the `deepspeed` command. They start ranks with the `xds` command."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from ..missing import placeholder

    return placeholder(__name__, name)
