"""Packs Python values and tensors as JSON. Types that JSON lacks become an object with one key, never code.

{"$tensor": "engine/0"}   {"$float": "inf"}   {"$path": "a/b"}   {"$dtype": "float32"}   {"$device": "cpu"}
{"$tuple": [...]}         {"$size": [...]}, a torch.Size         {"$set": [...]}         {"$frozenset": [...]}
{"$items": [[key, value]]}, a dict whose keys are not text       {"$counter": ...}       {"$ordered": ...}
{"$default": ["int", [[key, value]]]}                            {"$namespace": [[name, value]]}
{"$array": ["<f4", [2], base64]}                                 {"$scalar": the same, for a numpy number}

A list, tuple or mapping of another class is refused: it would lose its class.
"""

from __future__ import annotations

import math
from argparse import Namespace
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
from torch import Tensor

from ...ops.weights.tensor_table import check_storable, shown
from ...utils.errors import UsageError

SEQUENCES: dict[str, type] = {
    "": list,
    "$tuple": tuple,
    "$size": torch.Size,
    "$set": set,
    "$frozenset": frozenset,
}
MAPPINGS: dict[str, type] = {
    "$items": dict,
    "$counter": Counter,
    "$ordered": OrderedDict,
    "$default": defaultdict,
    "$namespace": Namespace,
}
LEAVES: dict[str, type | tuple[type, ...]] = {
    "$tensor": Tensor,
    "$float": float,
    "$path": PurePath,
    "$dtype": torch.dtype,
    "$device": torch.device,
    "$array": numpy.ndarray,
    "$scalar": numpy.generic,
}
TAG_OF = {kind: tag for tag, kind in (SEQUENCES | MAPPINGS).items()}
TAGS = {*filter(None, SEQUENCES), *MAPPINGS, *LEAVES}
FACTORIES: dict[str, type | None] = {  # of a defaultdict
    "": None,
    **{kind.__name__: kind for kind in (bool, int, float, str, list, tuple, set, dict)},
}
KEYS = (bool, int, float, str)
FLOATS = ("inf", "-inf", "nan")
DTYPES = {str(kind)[6:]: kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
MAX_DEPTH = 100  # of nested values: Python's recursion limit also applies to its JSON functions
SURROUNDING = 8  # levels of the manifest around a packed value
MAX_BITS = 10_000  # of an integer: Python does not convert much larger ones to text
MAX_ARRAY_BYTES = 1 << 20
NUMBERS = "biufc"  # numpy's kinds of dtypes: bool, integers, floats, complex numbers


def pack(value: Any, where: str, put: Callable[[Tensor], str], depth: int = 0) -> Any:
    """`value` as JSON; `put` stores each tensor in it and returns its name.

    Raises:
        UsageError: a checkpoint cannot hold a part of it; the message begins with its place, `where`.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return _pack_number(value, where)
    if isinstance(value, Tensor):
        check_storable(where, value)
        return {"$tensor": put(value)}
    if depth >= MAX_DEPTH:
        raise UsageError(
            f"{where[:200]}... is nested more than {MAX_DEPTH} levels deep, or contains itself: a checkpoint "
            f"holds at most {MAX_DEPTH} levels; flatten it"
        )
    tag = TAG_OF.get(type(value))
    if tag in SEQUENCES:
        return _pack_sequence(tag, value, where, put, depth + 1)
    if tag in MAPPINGS:
        return _pack_mapping(tag, value, where, put, depth + 1)
    tag = next((tag for tag, kind in LEAVES.items() if isinstance(value, kind)), None)
    if tag in ("$array", "$scalar"):
        return {tag: _pack_array(numpy.asarray(value), where)}
    if tag is not None:
        return {tag: str(value).removeprefix("torch.") if tag == "$dtype" else str(value)}
    raise UsageError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds numbers, text, "
        "bools, None, tensors, small arrays, and lists, tuples, sets, dicts and argparse.Namespaces of them; "
        "convert it, or leave it out"
    )


def _pack_number(value: int | float, where: str) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if value.bit_length() > MAX_BITS:
        raise UsageError(
            f"{where} is a number of {value.bit_length()} bits: a checkpoint holds {MAX_BITS}; save it as text"
        )
    return int(value)


def _pack_sequence(
    tag: str, value: Any, where: str, put: Callable[[Tensor], str], depth: int
) -> Any:
    if isinstance(value, set | frozenset):  # whose order differs between processes
        items = [pack(item, f"{where}: an item", put, depth) for item in sorted(value, key=repr)]
    else:
        items = [
            pack(item, f"{where}[{position}]", put, depth) for position, item in enumerate(value)
        ]
    return {tag: items} if tag else items


def _pack_mapping(
    tag: str, value: Any, where: str, put: Callable[[Tensor], str], depth: int
) -> Any:
    if isinstance(value, Namespace):
        pairs = [
            [key, pack(item, f"{where}.{key}", put, depth)] for key, item in vars(value).items()
        ]
        return {tag: pairs}
    for key in value:
        if not isinstance(key, KEYS):
            raise UsageError(
                f"{where} has the key {key!r}: keys in a checkpoint are text or numbers; convert it"
            )
    pairs = [
        [pack(key, where, put), pack(item, f"{where}[{key!r}]", put, depth)]
        for key, item in value.items()
    ]
    if tag == "$items" and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(pairs)
    if not isinstance(value, defaultdict):
        return {tag: pairs}
    for name, factory in FACTORIES.items():
        if value.default_factory is factory:
            return {tag: [name, pairs]}
    raise UsageError(
        f"{where} is a defaultdict of {value.default_factory!r}: a checkpoint keeps those of "
        f"{', '.join(filter(None, FACTORIES))} and None; convert it with dict()"
    )


def _pack_array(array: numpy.ndarray[Any, Any], where: str) -> list[Any]:
    if array.dtype.kind not in NUMBERS:
        raise UsageError(
            f"{where} is a numpy array of {array.dtype}: a checkpoint holds arrays of numbers; "
            "convert it to a list"
        )
    if array.nbytes > MAX_ARRAY_BYTES:
        raise UsageError(
            f"{where} is a numpy array of {array.nbytes} bytes: a checkpoint holds {MAX_ARRAY_BYTES} of one; "
            "save it as a tensor, with torch.from_numpy"
        )
    plain = numpy.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
    return [plain.dtype.str, list(array.shape), b64encode(plain.tobytes()).decode()]


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
    tag, content = next(iter(value.items()), ("", None))
    if len(value) != 1 or tag not in TAGS:
        return {key: unpack(item, get, depth + 1) for key, item in value.items()}
    if tag == "$tensor" and isinstance(content, str):
        return get(content)
    if tag in MAPPINGS:
        return _unpack_mapping(tag, content, get, depth + 1)
    if tag in SEQUENCES and isinstance(content, list):
        content = [unpack(item, get, depth + 1) for item in content]
    try:
        return _made(tag, content)
    except (TypeError, LookupError, RuntimeError, ValueError, ArithmeticError):
        raise ValueError(f"{tag} is {shown(content)}") from None


def _made(tag: str, content: Any) -> Any:
    """The value of a tag without pairs. Raises one of many errors: the content is wrong."""
    if tag in SEQUENCES:
        if not isinstance(content, list) or (tag == "$size" and {*map(type, content)} - {int}):
            raise TypeError
        return SEQUENCES[tag](content)
    if tag in ("$array", "$scalar"):
        name, shape, data = content
        dtype = numpy.dtype(_text(name))
        is_number = dtype.kind in NUMBERS and dtype.itemsize <= 32
        if not is_number or {*map(type, shape)} - {int}:
            raise TypeError
        raw = b64decode(_text(data), validate=True)
        array = numpy.frombuffer(raw, dtype).reshape(shape).copy()
        return array if tag == "$array" else array[()]
    if tag == "$float":
        return float(FLOATS[FLOATS.index(content)])
    text = _text(content)
    return DTYPES[text] if tag == "$dtype" else (Path if tag == "$path" else torch.device)(text)


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise TypeError
    return content


def _unpack_mapping(tag: str, content: Any, get: Callable[[str], Any], depth: int) -> Any:
    factory, pairs = "", content
    if tag == "$default" and isinstance(content, list) and len(content) == 2:
        factory, pairs = content
    if not isinstance(pairs, list) or not isinstance(factory, str) or factory not in FACTORIES:
        raise ValueError(f"{tag} is {shown(content)}")
    mapping: dict[Any, Any] = {}
    for pair in pairs:
        is_pair = isinstance(pair, list) and len(pair) == 2
        key = unpack(pair[0], get, depth) if is_pair else None
        if not isinstance(key, str if tag == "$namespace" else KEYS):
            raise ValueError(f"{tag} has {shown(pair)} for a pair of a key and its value")
        if key in mapping:
            raise ValueError(f"{tag} has the key {shown(key)} twice")
        mapping[key] = unpack(pair[1], get, depth)
    if tag == "$namespace":
        made = Namespace()
        vars(made).update(mapping)
        return made
    return defaultdict(FACTORIES[factory], mapping) if tag == "$default" else MAPPINGS[tag](mapping)
