"""What a checkpoint's manifest says, and how values become JSON. Nothing in it can be executed.

    manifest.json   {"sha256": "...", "format": "xds-checkpoint", "version": 1, flats, files, state, ...}

The sum is of the manifest's own bytes, with zeros in its place. Values that JSON has no word for are objects
with one key that begins with "$": {"$tensor": "client/0"}, {"$tuple": [...]}, {"$float": "inf"}.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from hashlib import sha256
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ...ops.errors import DamagedError, UsageError
from ...zero.ranges import Catalogue, ConstantRange, Range, SavedFlat

FORMAT, VERSION = "xds-checkpoint", 1
HEAD = '{"sha256": "'
NO_SUM = "0" * 64
TAGS = ("$tensor", "$tuple", "$float", "$items", "$counter")


@dataclass(frozen=True)
class FileRecord:
    """One rank's file.

    path: its name in the checkpoint's folder. crc32: of every `chunk_bytes` of it, the last one shorter.
    ranges, constants: what it holds of the flats. own: values of this rank alone, with tensors in the file.
    """

    path: str
    size_bytes: int
    chunk_bytes: int
    crc32: tuple[int, ...]
    ranges: tuple[Range, ...]
    constants: tuple[ConstantRange, ...]
    own: Any


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but the tensors. `state`: the engine's values; its tensors are in files[0].

    saved_seconds: when it was saved, in Unix time; 0 where the writer did not say.
    """

    format: str
    version: int
    xds: str
    tag: str
    world_size: int
    stage: int
    flats: tuple[SavedFlat, ...]
    files: tuple[FileRecord, ...]
    state: Any
    saved_seconds: float = 0.0

    @property
    def global_steps(self) -> int:
        """Optimizer steps taken before it was saved."""
        return int(self.state["counters"]["global_steps"])


# pydantic reads a plain dataclass field by field, with its types; unknown keys are left alone
_READER = TypeAdapter(Manifest)


def dump(manifest: Manifest) -> bytes:
    """The manifest's text."""
    # dataclasses.asdict copies every value: a third of the time of a save of many small tensors
    body = json.dumps(vars(manifest), allow_nan=False, default=_fields)
    text = f'{HEAD}{NO_SUM}", {body[1:]}'.encode()
    return _with_sum(text, sha256(text).hexdigest())


def _fields(one: Any) -> Any:
    if not is_dataclass(one):
        raise TypeError(f"a {type(one).__name__} is not JSON")
    return vars(one)


def record_to_json(record: FileRecord) -> dict[str, Any]:
    """The record in JSON values."""
    return {
        **vars(record),
        "ranges": [vars(one) for one in record.ranges],
        "constants": [vars(one) for one in record.constants],
    }


def _with_sum(text: bytes, digest: str) -> bytes:
    return text[: len(HEAD)] + digest.encode() + text[len(HEAD) + len(NO_SUM) :]


def parse(text: bytes, source: str) -> Manifest:
    """The manifest that `text` is.

    Raises:
        DamagedError: its sum is wrong. UsageError: it is of a newer version. Both name `source`.
    """
    digest = text[len(HEAD) : len(HEAD) + len(NO_SUM)].decode("ascii", "replace")
    if not text.startswith(HEAD.encode()):
        raise DamagedError(
            f"{source} is damaged, or not a manifest of an xds checkpoint: it does not begin with {HEAD}"
        )
    if sha256(_with_sum(text, NO_SUM)).hexdigest() != digest:
        raise DamagedError(
            f"{source} is damaged: its checksum does not match; load another checkpoint"
        )
    try:
        raw = json.loads(text)
        if raw.get("format") != FORMAT or raw.get("version") != VERSION:
            raise UsageError(
                f"{source} is {raw.get('format')} version {raw.get('version')}, and this xds reads {FORMAT} "
                f"version {VERSION}: load it with the xds {raw.get('xds')} that wrote it"
            )
        manifest = _READER.validate_python(raw)
    except (ValidationError, ValueError) as error:
        raise UsageError(f"{source} is not a manifest of an xds checkpoint: {error}") from None
    for record in manifest.files:
        if "/" in record.path or "\\" in record.path or record.path.startswith("."):
            raise UsageError(f"{source} names a file outside of its folder: {record.path!r}")
    return manifest


def constants_to_json(constants: list[ConstantRange]) -> list[ConstantRange]:
    """The same, with values that JSON can hold."""
    return [replace(one, value=pack(one.value, one.key, _no_tensor)) for one in constants]


def constants_of(record: FileRecord) -> list[ConstantRange]:
    """The constants of a file, with their values."""
    return [replace(one, value=unpack(one.value, _no_tensor)) for one in record.constants]


def _no_tensor(_: Any) -> Any:
    raise UsageError("a tensor stands where a number belongs")


def catalogue_of(manifest: Manifest, source: str) -> Catalogue:
    """What lies where. Raises DamagedError: two ranges claim the same elements; it names `source`."""
    ranges = [one for record in manifest.files for one in record.ranges]
    constants = [one for record in manifest.files for one in constants_of(record)]
    try:
        return Catalogue(manifest.flats, ranges, constants)
    except ValueError as error:
        raise DamagedError(f"{source} contradicts itself: {error}") from None


# -- values -------------------------------------------------------------------------------------------------


def pack(value: Any, where: str, put: Callable[[Tensor], str]) -> Any:
    """`value` as JSON; `put` takes every tensor in it and says its name.

    Raises:
        UsageError: something in it is neither JSON nor a tensor; the sentence begins with its place, `where`.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor):
        return {"$tensor": put(value)}
    if isinstance(value, list | tuple):
        items = [pack(item, f"{where}[{at}]", put) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _pack_mapping(value, where, put)
    raise UsageError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds numbers, text, "
        "bools, None, tensors, and lists, tuples and dicts of them; convert it, or leave it out"
    )


def _pack_mapping(value: Mapping[Any, Any], where: str, put: Callable[[Tensor], str]) -> Any:
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if plain and not isinstance(value, Counter):
        return {key: pack(item, f"{where}[{key!r}]", put) for key, item in value.items()}
    for key in value:
        if not isinstance(key, bool | int | float | str):
            raise UsageError(
                f"{where} has the key {key!r}: keys in a checkpoint are text or numbers; convert it"
            )
    items = [
        [pack(key, where, put), pack(item, f"{where}[{key!r}]", put)] for key, item in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$items": items}


def unpack(value: Any, get: Callable[[str], Tensor]) -> Any:
    """What `pack` made JSON of; `get` gives the tensor of a name."""
    if isinstance(value, list):
        return [unpack(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)) in TAGS:
        return _unpack_tagged(*next(iter(value.items())), get)
    return {key: unpack(item, get) for key, item in value.items()}


def _unpack_tagged(tag: str, content: Any, get: Callable[[str], Tensor]) -> Any:
    if tag == "$tensor":
        return get(content)
    if tag == "$float":
        return float(content)
    items = [unpack(item, get) for item in content]
    if tag == "$tuple":
        return tuple(items)
    pairs = {key: item for key, item in items}
    return Counter(pairs) if tag == "$counter" else pairs
