"""`deepspeed.utils.module_utils`: attributes of attributes by a name with dots."""

from __future__ import annotations

from functools import reduce
from typing import Any

from ..missing import placeholder


def recursive_getattr(model: Any, module_name: str) -> Any:
    """`model.a.b` for "a.b"."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """`model.a.b = module` for "a.b"."""
    parent, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, last, module)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["recursive_getattr", "recursive_setattr"]
