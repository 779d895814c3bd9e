"""The text of a manifest: writes it with its checksum, and parses it with every rule of `manifest`.

    manifest.json   {"sha256": "...", "format": "xds-checkpoint", "version": 2, flats, files, state, ...}

The checksum covers the manifest's bytes, with zeros in place of the checksum itself. A correct checksum is not
enough: another version or a script writes correct checksums, too.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import is_dataclass, replace
from hashlib import sha256
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ...ops.mesh import Mesh
from ...ops.weights.tensor_table import shown
from ...utils.errors import DamagedError, UsageError
from ...utils.small_files import parse_json
from ...zero.checkpoint.ranges import Catalogue, ConstantRange
from ...zero.layout.layout import Slot
from .manifest import (
    FORMAT,
    READ_VERSIONS,
    Manifest,
    RankPart,
    check_numbers,
    check_own,
    lengths_of,
)
from .packing import pack, unpack
from .saved_values import OwnValues, complaint, state_of

HEAD = '{"sha256": "'
NO_SUM = "0" * 64
UNLESS_SET = ("box", "channels_last")  # of a slot
# pydantic reads a plain dataclass field by field, with its types; unknown keys are ignored
_READER, _PART = TypeAdapter(Manifest), TypeAdapter(RankPart)
# checksums of manifests that passed: a save with keep_last reads the same manifests repeatedly
_SOUND: deque[str] = deque(maxlen=64)


def dump(manifest: Manifest) -> bytes:
    """The manifest's text."""
    # dataclasses.asdict copies every value: a third of the time of a save of many small tensors
    unless_set = ("nodes", "score")
    fields = {key: value for key, value in vars(manifest).items() if key not in unless_set or value}
    body = json.dumps(fields, allow_nan=False, default=_fields)
    text = f'{HEAD}{NO_SUM}", {body[1:]}'.encode()
    return _with_sum(text, sha256(text).hexdigest())


def part_to_json(part: RankPart) -> Any:
    """The part in JSON values."""
    return json.loads(json.dumps(part, default=_fields))


def part_of_json(part: Any) -> RankPart:
    """The part that another rank sent."""
    return _PART.validate_python(part)


def _fields(record: Any) -> Any:
    if not is_dataclass(record):
        raise TypeError(f"a {type(record).__name__} is not JSON")
    fields = vars(record)
    if isinstance(record, Slot):  # most are whole tensors, and row-major
        return {key: value for key, value in fields.items() if key not in UNLESS_SET or value}
    return fields


def _with_sum(text: bytes, digest: str) -> bytes:
    return text[: len(HEAD)] + digest.encode() + text[len(HEAD) + len(NO_SUM) :]


def parse(text: bytes, source: str) -> Manifest:
    """Parse and check a manifest.

    Raises:
        DamagedError: its checksum or its content is wrong.
        UsageError: it has another version, or contents that this xds cannot read.
    Every message names `source`.
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
    manifest = _typed(text, source)
    if digest not in _SOUND:
        try:
            check_numbers(manifest)
            _check_values(manifest)
        except ValueError as error:
            raise DamagedError(f"{source} contradicts itself: {error}") from None
        _SOUND.append(digest)
    return manifest


def _typed(text: bytes, source: str) -> Manifest:
    """The manifest in `text`, with each value of its declared type."""
    try:
        raw = parse_json(text)
        version = raw.get("version")
        if raw.get("format") != FORMAT or version not in READ_VERSIONS:
            raise UsageError(
                f"{source} is {shown(raw.get('format'))} version {shown(version)}, and this xds reads {FORMAT} "
                f"versions 1 and 2: load it with the xds {shown(raw.get('xds'))} that wrote it"
            )
        manifest: Manifest = _READER.validate_python(raw)
        return _upgraded(manifest) if version == 1 else manifest
    except ValidationError as error:
        raise DamagedError(f"{source} contradicts itself: {complaint(error)}") from None
    except RecursionError:
        raise DamagedError(f"{source} is damaged: it is nested too deeply") from None
    except ValueError as error:
        raise DamagedError(f"{source} is damaged: it {error}") from None


def _upgraded(manifest: Manifest) -> Manifest:
    """A manifest of version 1, with the fields of version 2: every rank holds every flat."""
    num_ranks = len(manifest.files)
    flats = tuple(replace(flat, held_by=0) if flat.held_by else flat for flat in manifest.flats)
    mesh = lengths_of(Mesh(1, num_ranks)) if num_ranks else {}
    return replace(manifest, flats=flats, mesh=mesh, holders=(tuple(range(num_ranks)),))


def _check_values(manifest: Manifest) -> None:
    state = state_of(manifest.state)
    if state.optimizer is None and any(
        elements.key.startswith("state/") for r in manifest.files for elements in r.ranges
    ):
        raise ValueError("it has states of an optimizer, and no optimizer")
    for number, record in enumerate(manifest.files):
        check_own(number, OwnValues.of(record.own), manifest.flats)
        if state.counters.is_accumulating and "grads" not in record.own:
            raise ValueError(f"files[{number}].own has no grads, in the middle of an accumulation")


def constants_to_json(constants: list[ConstantRange]) -> list[ConstantRange]:
    """The constants with their values packed as JSON."""
    return [
        replace(constant, value=pack(constant.value, constant.key, _no_tensor))
        for constant in constants
    ]


def _no_tensor(_: Any) -> Any:
    raise UsageError("a tensor stands where a number belongs")


def catalogue_of(manifest: Manifest, source: str) -> Catalogue:
    """The catalogue of all ranges, with the values of the constants unpacked.

    Raises DamagedError: two ranges hold the same elements; names `source`.
    """
    packed = [constant for record in manifest.files for constant in record.constants]
    constants = [replace(constant, value=unpack(constant.value, _no_tensor)) for constant in packed]
    try:
        return Catalogue(manifest.flats, manifest.ranges, constants)
    except ValueError as error:
        raise DamagedError(f"{source} contradicts itself: {error}") from None
