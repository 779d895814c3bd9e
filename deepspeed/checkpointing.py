"""`deepspeed.checkpointing`: the names of `deepspeed.runtime.activation_checkpointing.checkpointing`."""

from __future__ import annotations

from typing import Any

from .runtime.activation_checkpointing import checkpointing as _inner
from .runtime.activation_checkpointing.checkpointing import checkpoint as checkpoint
from .runtime.activation_checkpointing.checkpointing import configure as configure
from .runtime.activation_checkpointing.checkpointing import is_configured as is_configured
from .runtime.activation_checkpointing.checkpointing import (
    non_reentrant_checkpoint as non_reentrant_checkpoint,
)
from .runtime.activation_checkpointing.checkpointing import reset as reset


def __getattr__(name: str) -> Any:
    return getattr(_inner, name)
