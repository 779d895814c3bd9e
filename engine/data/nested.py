"""The tensors in a batch: in dicts, lists, tuples, other mappings, dataclasses, in any nesting."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ...ops.torch_internals import tree_leaves, tree_map


def replaced(
    batch: Any, one: Callable[[Tensor], Tensor], other: Callable[[Any], Any] | None = None
) -> Any:
    """`batch` with `one(tensor)` for each tensor in it, in containers of the same types.

    other: for what is neither a tensor nor a container. Without it, mappings that are no dict (as a tokenizer
        returns them), dataclasses and PackedSequences stay as they are.
    An object of the script is never changed: a copy has the new tensors, if any tensor is another one.
    """

    # functions that call each other would hold the tensors until Python looks for cycles
    return tree_map(partial(_leaf, one, other), batch, is_leaf=_is_packed)


def _leaf(one: Callable[[Tensor], Tensor], other: Callable[[Any], Any] | None, value: Any) -> Any:
    if isinstance(value, Tensor):
        return one(value)
    if other is None:
        return value
    if isinstance(value, Mapping):
        return _mapping(value, {key: replaced(item, one, other) for key, item in value.items()})
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        return _dataclass(
            value, {name: replaced(getattr(value, name), one, other) for name in names}
        )
    return other(value)


def _is_packed(value: Any) -> bool:
    """Its fields are not independent: batch_sizes has to stay on the host."""
    return isinstance(value, PackedSequence)


def _is_same(old: Any, new: Any) -> bool:
    """Both hold the same objects, perhaps in other lists and dicts."""
    pairs = zip(tree_leaves(old), tree_leaves(new), strict=True)
    return all(before is after for before, after in pairs)


def _mapping(old: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    if all(_is_same(old[key], item) for key, item in items.items()):
        return old
    if not isinstance(old, MutableMapping):
        return items
    new = copy.copy(old)
    new.update(items)
    return new


def _dataclass(old: Any, values: dict[str, Any]) -> Any:
    changed = {
        name: value for name, value in values.items() if not _is_same(getattr(old, name), value)
    }
    if not changed:
        return old
    new = copy.copy(old)
    for name, value in changed.items():
        object.__setattr__(new, name, value)  # a frozen one refuses setattr
    return new


__all__ = ["replaced"]
