"""Packs Python values and tensors as JSON. Types that JSON lacks become an object with one key, never code.

{"$tensor": "engine/0"}   {"$tuple": [...]}   {"$float": "inf"}   {"$size": [...]}, a torch.Size
{"$items": [[key, value]]}   {"$counter": ...}   {"$ordered": ...}   {"$default": ["int", [[key, value]]]}
`packed_types` has more of them. A list, tuple or mapping of another class is refused: it would lose its class.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...utils.errors import UsageError
from . import packed_types
from .io.tensor_table import check_storable, shown

MAPPINGS: dict[type, str] = {
    dict: "$items",
    Counter: "$counter",
    OrderedDict: "$ordered",
    defaultdict: "$default",
}
SEQUENCES: dict[type, str] = {list: "", tuple: "$tuple", torch.Size: "$size"}
FACTORIES: dict[str, type | None] = {  # of a defaultdict
    "": None,
    **{kind.__name__: kind for kind in (bool, int, float, str, list, tuple, set, dict)},
}
CONTAINERS = {tag: kind for kind, tag in (SEQUENCES | MAPPINGS).items() if tag}
TAGS = ("$tensor", "$float", *CONTAINERS)
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
    if type(value) in SEQUENCES:
        items = [pack(item, f"{where}[{at}]", put, depth + 1) for at, item in enumerate(value)]
        tag = SEQUENCES[type(value)]
        return {tag: items} if tag else items
    if type(value) in MAPPINGS:
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
    if type(value) is dict and all(isinstance(k, str) and not k.startswith("$") for k in value):
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
    tag = MAPPINGS[type(value)]
    return {tag: [_factory_of(value, where), items] if isinstance(value, defaultdict) else items}


def _factory_of(value: defaultdict[Any, Any], where: str) -> str:
    for name, factory in FACTORIES.items():
        if value.default_factory is factory:
            return name
    raise UsageError(
        f"{where} is a defaultdict of {value.default_factory!r}: a checkpoint keeps those of "
        f"{', '.join(filter(None, FACTORIES))} and None; convert it with dict()"
    )


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
    if tag == "$default":
        if len(content) != 2 or content[0] not in list(FACTORIES):
            raise ValueError(f"{tag} is {shown(content)}")
        return defaultdict(FACTORIES[content[0]], _unpack_pairs(tag, content[1], get, depth))
    kind: Any = CONTAINERS[tag]
    if kind in MAPPINGS:
        return kind(_unpack_pairs(tag, content, get, depth))
    items = [unpack(item, get, depth + 1) for item in content]
    if tag == "$size" and not all(type(item) is int for item in items):
        raise ValueError(f"{tag} is {shown(content)}")
    return kind(items)


def _unpack_pairs(tag: str, content: Any, get: Callable[[str], Any], depth: int) -> dict[Any, Any]:
    pairs: dict[Any, Any] = {}
    for pair in content if isinstance(content, list) else [content]:
        is_pair = isinstance(pair, list) and len(pair) == 2
        key = unpack(pair[0], get, depth + 1) if is_pair else None
        if not isinstance(key, bool | int | float | str):
            raise ValueError(f"{tag} has {shown(pair)} for a pair of a key and its value")
        if key in pairs:
            raise ValueError(f"{tag} has the key {shown(key)} twice")
        pairs[key] = unpack(pair[1], get, depth + 1)
    return pairs
