"""What all stages know of a micro-batch: it decides what flows between them, and in which shapes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


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
    flag = _flag(name, value)
    if flag is None:
        return False
    if value.device.type == "cpu":  # it may share memory that others write to
        return bool(flag())
    version, masks = _seen.get(value, (-1, False))
    if version != _version(value):
        masks = bool(flag())
        _seen[value] = (_version(value), masks)
    return bool(masks)


def _flag(name: str, value: Any) -> Callable[[], Tensor] | None:
    """Whether the argument `name` does so, []; None: it says nothing of the kind."""
    if not isinstance(value, Tensor) or value.dim() != 2:
        return None
    if name == "attention_mask":
        return lambda: value.ne(0).all().logical_not()
    if name == "position_ids":
        return lambda: (value.diff(dim=1) != 1).any()
    return None


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


# whether a tensor of a batch, which is the script's, masks tokens, with its version: the host waits only once
_seen: Any = WeakTensorKeyDictionary()


def look_at(batches: Sequence[Any]) -> None:
    """Learn what `kind` needs of tensors on a device: the host waits once for all of them."""
    flags = [pair for batch in batches for pair in _flags(batch)]
    if flags:
        values = torch.stack([flag() for _, flag in flags]).tolist()
        for (value, _), flag in zip(flags, values, strict=True):
            _seen[value] = (_version(value), bool(flag))


def _flags(value: Any) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            flag = _flag(name, item)
            if flag is not None and item.device.type != "cpu":
                yield item, flag
            yield from _flags(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flags(item)


__all__ = ["kind", "look_at", "signature"]
