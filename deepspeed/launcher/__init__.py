"""`deepspeed.launcher`: the functions of the `deepspeed` command. They start ranks with the `xds` command."""

from __future__ import annotations

from typing import Any

from ..missing import placeholder


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
