"""Plain types of Python, numpy and torch as JSON, one tag for each: what scripts keep in `client_state`.

{"$namespace": [[name, value]]}   {"$set": [...]}   {"$frozenset": [...]}   {"$path": "a/b"}
{"$dtype": "float32"}   {"$device": "cpu"}   {"$array": ["<f4", [2], base64]}
{"$scalar": the same, for a numpy number}

Reading makes only these types, from checked text. It runs no code of the file.
"""

from __future__ import annotations

import base64
import binascii
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch

from ...utils.errors import UsageError
from .io.tensor_table import shown

MAX_ARRAY_BYTES = 1 << 20
KINDS = "biufc"  # of numpy's dtypes: bool, integers, floats, complex numbers
DTYPES = {
    str(one).removeprefix("torch."): one
    for one in vars(torch).values()
    if isinstance(one, torch.dtype)
}
TAGS = (
    *("$namespace", "$set", "$frozenset", "$path"),
    *("$dtype", "$device", "$array", "$scalar"),
)

Inner = Callable[[Any, str], Any]


def pack_plain(value: Any, where: str, pack: Inner) -> dict[str, Any] | None:
    """`value` with its tag; None: it is none of these types. `pack`: for what it contains.

    Raises:
        UsageError: an array of more than MAX_ARRAY_BYTES, or of objects.
    """
    if type(value) is Namespace:
        items = [[name, pack(item, f"{where}.{name}")] for name, item in vars(value).items()]
        return {"$namespace": items}
    if type(value) in (set, frozenset):
        tag = "$set" if type(value) is set else "$frozenset"
        return {tag: [pack(item, f"{where}: an item") for item in sorted(value, key=repr)]}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, numpy.ndarray | numpy.generic):
        tag = "$array" if isinstance(value, numpy.ndarray) else "$scalar"
        return {tag: _pack_array(numpy.asarray(value), where)}
    return None


def _pack_array(array: numpy.ndarray[Any, Any], where: str) -> list[Any]:
    if array.dtype.kind not in KINDS:
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
    return [plain.dtype.str, list(array.shape), base64.b64encode(plain.tobytes()).decode()]


def unpack_plain(tag: str, content: Any, unpack: Callable[[Any], Any]) -> Any:
    """The value that `pack_plain` gave this tag. Raises ValueError: it cannot have written it."""
    try:
        return _READERS[tag](content, unpack)
    except (TypeError, KeyError, RuntimeError, ValueError, AttributeError):
        raise ValueError(f"{tag} is {shown(content)}") from None


def _namespace(content: Any, unpack: Callable[[Any], Any]) -> Namespace:
    made = Namespace()
    for name, item in content:
        if _text(name) in vars(made):
            raise ValueError(name)
        vars(made)[name] = unpack(item)
    return made


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise TypeError(content)
    return content


def _array(content: Any, unpack: object) -> numpy.ndarray[Any, Any]:
    name, shape, data = content
    dtype = numpy.dtype(_text(name))
    if dtype.kind not in KINDS or dtype.itemsize > 32 or not all(type(one) is int for one in shape):
        raise ValueError(name)
    try:
        raw = base64.b64decode(_text(data), validate=True)
    except binascii.Error:
        raise ValueError(name) from None
    made: numpy.ndarray[Any, Any] = numpy.frombuffer(raw, dtype).reshape(shape).copy()
    return made


_READERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "$namespace": _namespace,
    "$set": lambda content, unpack: {unpack(item) for item in content},
    "$frozenset": lambda content, unpack: frozenset(unpack(item) for item in content),
    "$path": lambda content, unpack: Path(_text(content)),
    "$dtype": lambda content, unpack: DTYPES[_text(content)],
    "$device": lambda content, unpack: torch.device(_text(content)),
    "$array": _array,
    "$scalar": lambda content, unpack: _array(content, unpack)[()],
}


__all__ = ["TAGS", "pack_plain", "unpack_plain"]
