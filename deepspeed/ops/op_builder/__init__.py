"""`deepspeed.ops.op_builder`: the names of builder.py."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(import_module(".builder", __name__), name)
