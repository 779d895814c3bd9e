"""`deepspeed.runtime.activation_checkpointing`: recomputation that the script asks for, layer by layer."""

from __future__ import annotations

from typing import Any

from ...missing import placeholder


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
