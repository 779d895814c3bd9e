"""Finds the tensors in whatever a module returns: tuples, mappings, dataclasses, objects of the user's own.

torch's pytree knows the containers that were registered with it. A tensor that it does not see gets no
hook, and then backward would meet parameters that are not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_PLAIN = (type(None), str, bytes, int, float, complex, type, nn.Module)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in `value`; modules and classes in it are not looked into."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    seen: set[int] = set()  # an object may refer to itself
    waiting = [value]
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif not isinstance(leaf, _PLAIN) and id(leaf) not in seen:
                seen.add(id(leaf))
                waiting += _values(leaf)
    return found


def _values(holder: Any) -> list[Any]:
    """What a container that pytree does not know holds."""
    if isinstance(holder, Mapping):
        return list(holder.values())
    if isinstance(holder, list | tuple | set | frozenset):  # of a class of their own
        return list(holder)
    if is_dataclass(holder):  # with slots it has no __dict__
        return [getattr(holder, field.name, None) for field in fields(holder)]
    return list(getattr(holder, "__dict__", {}).values())
