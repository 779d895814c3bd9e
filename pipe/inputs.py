"""What all stages know of a micro-batch: it decides what flows between them, and in which shapes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor


def signature(value: Any) -> Hashable:
    """The shapes and dtypes in a batch, and its kind: inputs of one signature flow in one shape."""
    return _shapes(value), kind(value)


def kind(value: Any) -> Hashable:
    """The arguments in a batch, without shapes: inputs of one kind take one way through the model.

    Models of transformers make no mask where nothing is padded or packed, so that is a part of it.
    """
    if isinstance(value, Mapping):
        return tuple((str(key), kind(item), _masks(key, item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(kind(item) for item in value)
    return type(value).__name__


def _shapes(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple(_shapes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return tuple(_shapes(item) for item in value)
    return None


def _masks(name: str, value: Any) -> bool:
    """The argument `name` says that some tokens do not see all before them."""
    if not isinstance(value, Tensor) or value.dim() != 2:
        return False
    if name == "attention_mask":
        return not bool(value.all())
    return name == "position_ids" and bool((value.diff(dim=1) != 1).any())


__all__ = ["kind", "signature"]
