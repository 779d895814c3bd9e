"""Packs Python values and tensors as JSON. Types that JSON lacks become an object with one key, never code.

{"$tensor": "engine/0"}   {"$tuple": [...]}   {"$float": "inf"}   {"$items": [[key, value]]}   {"$counter": ...}
`packed_types` has more of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...utils.errors import UsageError
from . import packed_types
from .io.tensor_table import check_storable, shown

TAGS = ("$tensor", "$tuple", "$float", "$items", "$counter")
FLOATS = ("inf", "-inf", "nan")
MAX_DEPTH = 100  # of nested values: Python's recursion limit also applies to its JSON functions
SURROUNDING = 8  # levels of the manifest around a packed value
MAX_BITS = 10_000  # of an integer: Python does not convert much larger ones to text


def pack(value: Any, where: str, put: Callable[[Tensor], str], depth: int = 0) -> Any:
    """`value` as JSON; `put` stores each tensor in it and returns its name.

    Raises:
        UsageError: a part of it is neither JSON nor a tensor; the message begins with its place, `where`.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise UsageError(
                f"{where} is a number of {value.bit_length()} bits: a checkpoint holds {MAX_BITS}; save it as "
                "text"
            )
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor):
        check_storable(where, value)
        return {"$tensor": put(value)}
    if depth >= MAX_DEPTH:
        raise UsageError(
            f"{where[:200]}... is nested more than {MAX_DEPTH} levels deep, or contains itself: a checkpoint "
            f"holds at most {MAX_DEPTH} levels; flatten it"
        )
    if isinstance(value, list | tuple):
        items = [pack(item, f"{where}[{at}]", put, depth + 1) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _pack_mapping(value, where, put, depth + 1)
    plain = packed_types.pack_plain(value, where, lambda item, at: pack(item, at, put, depth + 1))
    if plain is not None:
        return plain
    raise UsageError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds numbers, text, "
        "bools, None, tensors, small arrays, and lists, tuples, sets, dicts and argparse.Namespaces of them; "
        "convert it, or leave it out"
    )


def _pack_mapping(
    value: Mapping[Any, Any], where: str, put: Callable[[Tensor], str], depth: int
) -> Any:
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if plain and not isinstance(value, Counter):
        return {key: pack(item, f"{where}[{key!r}]", put, depth) for key, item in value.items()}
    for key in value:
        if not isinstance(key, bool | int | float | str):
            raise UsageError(
                f"{where} has the key {key!r}: keys in a checkpoint are text or numbers; convert it"
            )
    items = [
        [pack(key, where, put), pack(item, f"{where}[{key!r}]", put, depth)]
        for key, item in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$items": items}


def unpack(value: Any, get: Callable[[str], Any], depth: int = 0) -> Any:
    """The value that `pack` converted to JSON; `get` returns the tensor of a name.

    Raises ValueError: `pack` cannot have written it.
    """
    if not isinstance(value, list | dict):
        return value
    if depth > MAX_DEPTH + SURROUNDING:
        raise ValueError(f"its values are nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [unpack(item, get, depth + 1) for item in value]
    tag, content = next(iter(value.items()), (None, None))
    if len(value) == 1 and tag in TAGS:
        return _unpack_tagged(tag, content, get, depth)
    if len(value) == 1 and tag in packed_types.TAGS:
        return packed_types.unpack_plain(tag, content, lambda item: unpack(item, get, depth + 1))
    return {key: unpack(item, get, depth + 1) for key, item in value.items()}


def _unpack_tagged(tag: str, content: Any, get: Callable[[str], Any], depth: int) -> Any:
    if tag == "$tensor" and isinstance(content, str):
        return get(content)
    if tag == "$float" and content in FLOATS:
        return float(content)
    if tag in ("$tensor", "$float") or not isinstance(content, list):
        raise ValueError(f"{tag} is {shown(content)}")
    if tag == "$tuple":
        return tuple(unpack(item, get, depth + 1) for item in content)
    pairs = {}
    for pair in content:
        is_pair = isinstance(pair, list) and len(pair) == 2
        key = unpack(pair[0], get, depth + 1) if is_pair else None
        if not isinstance(key, bool | int | float | str):
            raise ValueError(f"{tag} has {shown(pair)} for a pair of a key and its value")
        pairs[key] = unpack(pair[1], get, depth + 1)
    return Counter(pairs) if tag == "$counter" else pairs
