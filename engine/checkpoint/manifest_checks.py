"""The rules that a manifest must satisfy before a checkpoint is loaded.

    types      pydantic, from the dataclasses' annotations             format.py
    numbers    flats, ranges, constants and files are consistent       here, when a manifest is parsed
    values     the engine's state and the values of each rank          saved_values.py, when it is parsed
    tensors    each file holds the tensors that the manifest lists     here, when a file is opened

All checks run before anything is changed. Every function raises ValueError, whose text names the place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import inf, prod
from typing import Any, NoReturn

import torch

from ...ops.flat import numel_of
from ...ops.mesh import AXES
from ...zero.checkpoint.ranges import (
    COPY,
    ERROR,
    SERVER,
    ConstantRange,
    Range,
    SavedFlat,
    kind_of_number,
)
from ...zero.core.layout import Box, Slot
from .io.tensor_table import BY_NAME, MAX_DIMS, MAX_NUMEL, Located, is_possible, shown
from .io.writer import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from .manifest import FileRecord, Manifest, totals_of
from .packing import unpack
from .saved_values import Named, OwnValues, names_in

KINDS = ("param", "buffer", "either", "state")
OWN_FILE = re.compile(r"rank_[0-9]{5,}-[0-9a-f]{8}\.safetensors")
MAX_STAGE, MAX_CRC = 3, (1 << 32) - 1
RANK_DIGITS = 7
MAX_ONES = 64  # dimensions of a tensor of one element


def check_numbers(manifest: Manifest) -> None:
    """Check that flats, ranges, constants and files are consistent."""
    _require(manifest.stage <= MAX_STAGE, "stage", manifest.stage)
    _check_mesh(manifest)
    holders = [frozenset(ranks) for ranks in manifest.holders]
    _check_flats(manifest.flats, len(holders))
    paths: set[str] = set()
    dtypes: dict[tuple[int, str], str] = {}
    for number, record in enumerate(manifest.files):
        where = f"files[{number}]"
        _check_record(where, record)
        _require(record.path not in paths, f"{where}.path", record.path)
        paths.add(record.path)
        _check_ranges(where, number, record, manifest.flats, dtypes)
        for at, constant in enumerate(record.constants):
            _check_constant(f"{where}.constants[{at}]", constant, manifest.flats)
        for flat in {one.flat for one in record.ranges} | {one.flat for one in record.constants}:
            if number not in holders[manifest.flats[flat].held_by]:
                _refuse_holder(number, flat, manifest)
    _check_totals(manifest)


def _require(is_right: bool, where: str, value: Any) -> None:
    if not is_right:
        _refuse(where, value)


def _refuse(where: str, value: Any) -> NoReturn:
    raise ValueError(f"{where} is {shown(value)}, which does not fit the rest of it")


def _refuse_dtype(where: str, name: str) -> NoReturn:
    raise ValueError(
        f"{where} is the dtype {shown(name)}, which this torch does not have, or no checkpoint holds"
    )


def _check_totals(manifest: Manifest) -> None:
    """Check that no range is missing which was there at the save."""
    found = totals_of(manifest.files)
    for key in sorted({*found, *manifest.totals}) if manifest.totals else ():
        here, saved = found.get(key, 0), manifest.totals.get(key, 0)
        if here != saved:
            raise ValueError(
                f"its files have {here} elements of {shown(key)}, and {saved} were saved"
            )


# -- ranks --------------------------------------------------------------------------------------------------


def _check_mesh(manifest: Manifest) -> None:
    mesh, num_files = manifest.mesh, len(manifest.files)
    num_ranks = prod(mesh.values())
    if sorted(mesh) != sorted(AXES):
        _refuse("mesh", mesh)
    if not manifest.world_size == num_ranks == num_files:
        lengths = " x ".join(f"{axis} {mesh[axis]}" for axis in AXES)
        raise ValueError(
            f"it has the files of {num_files} ranks and should have those of {num_ranks} ({lengths}), with "
            f"world_size {shown(manifest.world_size)}"
        )
    for number, ranks in enumerate(manifest.holders):
        rises = all(before < after for before, after in pairwise(ranks))
        _require(bool(ranks) and rises and ranks[-1] < num_files, f"holders[{number}]", ranks)
    for number, node in enumerate(manifest.nodes):
        rises = all(before < after for before, after in pairwise(node.ranks))
        _require(bool(node.ranks) and rises, f"nodes[{number}].ranks", node.ranks)
    found = sorted(rank for node in manifest.nodes for rank in node.ranks)
    if manifest.nodes:
        _require(found == list(range(num_files)), "the ranks of nodes", found)


def _refuse_holder(rank: int, flat: int, manifest: Manifest) -> NoReturn:
    name = manifest.flats[flat].slots[0].name if manifest.flats[flat].slots else ""
    raise ValueError(
        f"the file of rank {rank} has a part of flats[{flat}] ({shown(name)}), which is held by the ranks "
        f"{shown(list(manifest.holders_of(manifest.flats[flat])))}"
    )


# -- flats --------------------------------------------------------------------------------------------------


def _check_flats(flats: Iterable[SavedFlat], num_holders: int) -> None:
    # texts of places are built only for errors: there may be many thousands of places
    names: dict[tuple[bool, str], list[tuple[SavedFlat, Slot]]] = {}
    for number, flat in enumerate(flats):
        if flat.kind not in KINDS:
            _refuse(f"flats[{number}].kind", flat.kind)
        if flat.dtype not in BY_NAME:
            _refuse_dtype(f"flats[{number}].dtype", flat.dtype)
        if flat.held_by >= num_holders:
            _refuse(f"flats[{number}].held_by", flat.held_by)
        numel = _check_slots(number, flat, names)
        if flat.kind != "param" and (len(flat.slots) != 1 or numel != flat.numel):
            _refuse(f"flats[{number}], a {flat.kind}: slots", len(flat.slots))
        if len(flat.slots) > 1:
            _check_overlaps(f"flats[{number}]", flat)
        own = {slot.name for slot in flat.slots} if flat.tied else set()
        for _, name in flat.tied:
            _require(name in own, f"flats[{number}].tied", name)
    for found in names.values():
        if len(found) > 1 or found[0][1].box is not None:
            _check_slices(found)


def _check_slots(
    number: int, flat: SavedFlat, names: dict[tuple[bool, str], list[tuple[SavedFlat, Slot]]]
) -> int:
    """The number of elements of all slots; adds the slots to `names`."""
    total = 0
    is_state = flat.kind == "state"
    for slot in flat.slots:
        numel = slot.numel
        is_small = 0 < numel <= MAX_NUMEL and len(slot.shape) <= MAX_DIMS
        if not (is_small or is_possible(slot.shape)) or slot.offset + numel > flat.numel:
            _refuse(f"flats[{number}], {shown(slot.name)}: shape or offset", slot.shape)
        found = names.setdefault((is_state, slot.name), [])
        if (found and slot.box is None) or (is_state and "/" not in slot.name):
            _refuse(f"flats[{number}]: the name of a slot", slot.name)
        if slot.box is not None and (flat.kind != "param" or not _is_slice(slot, slot.box)):
            _refuse(f"flats[{number}], {shown(slot.name)}: box", slot.box.ranges[:4])
        found.append((flat, slot))
        total += numel
    return total


def _is_slice(slot: Slot, box: Box) -> bool:
    """The box is not empty, inside the whole tensor, and has the shape of the slot."""
    if not is_possible(box.whole) or box.dim >= len(box.whole) or not box.ranges:
        return False
    ends = [end for ends in box.ranges for end in ends]
    rises = all(start < stop for start, stop in box.ranges)
    rises = rises and all(before <= after for before, after in pairwise(ends))
    return rises and ends[-1] <= box.whole[box.dim] and box.shape == slot.shape


def _check_slices(found: list[tuple[SavedFlat, Slot]]) -> None:
    """Check that slots of one name are slices of one tensor which have no element in common."""
    boxes = [slot.box for _, slot in found if slot.box is not None]
    name = found[0][1].name
    if len(boxes) < len(found) or len({(box.whole, box.dim) for box in boxes}) > 1:
        _refuse(f"the slices of {shown(name)}", [box.whole for box in boxes][:4])
    same = {(flat.kind, flat.trains, flat.dtype, flat.has_values) for flat, _ in found}
    _require(len(same) == 1, f"the buffers with slices of {shown(name)}", sorted(map(str, same)))
    ranges = sorted(one for box in boxes for one in box.ranges)
    for before, after in pairwise(ranges):
        _require(before[1] <= after[0], f"the slices of {shown(name)}: ranges", [before, after])


def _check_overlaps(where: str, flat: SavedFlat) -> None:
    full = sorted((slot for slot in flat.slots if slot.numel), key=lambda slot: slot.offset)
    for before, after in pairwise(full):
        is_same = (before.offset, before.stop) == (after.offset, after.stop)
        if before.stop > after.offset and not is_same:
            _refuse(f"{where}, {shown(after.name)}: offset", after.offset)


# -- files --------------------------------------------------------------------------------------------------


def _check_record(where: str, record: FileRecord) -> None:
    _require(OWN_FILE.fullmatch(record.path) is not None, f"{where}.path", record.path)
    size, chunk = record.size_bytes, record.chunk_bytes
    is_power = MIN_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES and chunk & (chunk - 1) == 0
    _require(is_power, f"{where}.chunk_bytes", chunk)
    _require(
        len(record.crc32) == -(-size // chunk), f"the number of {where}.crc32", len(record.crc32)
    )
    _require(max(record.crc32, default=0) <= MAX_CRC, f"{where}.crc32", "a larger number")


def _check_ranges(
    where: str,
    number: int,
    record: FileRecord,
    flats: tuple[SavedFlat, ...],
    dtypes: dict[tuple[int, str], str],
) -> None:
    size_bytes = 0
    tensors: set[str] = set()
    for at, one in enumerate(record.ranges):
        if one.dtype not in BY_NAME:
            _refuse_dtype(f"{where}.ranges[{at}].dtype", one.dtype)
        if not _is_place(one, flats):
            _refuse(f"{where}.ranges[{at}]: flat, start, stop", (one.flat, one.start, one.stop))
        if one.file != number or one.tensor in tensors:
            _refuse(f"{where}.ranges[{at}]: file or tensor", (one.file, one.tensor))
        if (
            not _is_key(one, flats[one.flat])
            or dtypes.setdefault((one.flat, one.key), one.dtype) != one.dtype
        ):
            _refuse(f"{where}.ranges[{at}]: key or dtype", (one.key, one.dtype))
        tensors.add(one.tensor)
        size_bytes += (one.stop - one.start) * BY_NAME[one.dtype].itemsize
    _require(size_bytes <= record.size_bytes, f"{where}.size_bytes", record.size_bytes)


def _is_place(one: Range | ConstantRange, flats: tuple[SavedFlat, ...]) -> bool:
    return one.flat < len(flats) and one.start < one.stop <= flats[one.flat].numel


def _is_key(one: Range, flat: SavedFlat) -> bool:
    if flat.kind == "state":
        return one.key == f"state/{flat.slots[0].name.rpartition('/')[2]}"
    if one.key == "value":
        return one.dtype == flat.dtype or kind_of_number(one.dtype) == kind_of_number(flat.dtype)
    if one.key in (SERVER, COPY) or one.key.startswith(ERROR):
        rank = one.key.removeprefix(ERROR)
        is_known = one.key in (SERVER, COPY) or (rank.isdecimal() and len(rank) <= RANK_DIGITS)
        return flat.trains and is_known and kind_of_number(one.dtype) == "float"
    return flat.trains if one.key == "grad" else one.key.startswith("state/")


def _check_constant(place: str, one: ConstantRange, flats: tuple[SavedFlat, ...]) -> None:
    _require(_is_place(one, flats), f"{place}: flat, start, stop", (one.flat, one.start, one.stop))
    _require(one.key.startswith("state/"), f"{place}.key", one.key)
    _require(len(one.shape) <= MAX_ONES and numel_of(one.shape) == 1, f"{place}.shape", one.shape)
    value = unpack(one.value, Named)
    is_plain = value is None or isinstance(value, bool | int | float | str)
    is_count = one.key == "state/step" and isinstance(value, int | float)
    _require(is_plain and (not is_count or 0 <= value < inf), f"{place}.value", value)
    if one.dtype is None:
        return
    if one.dtype not in BY_NAME:
        _refuse_dtype(f"{place}.dtype", one.dtype)
    is_number = isinstance(value, bool | int | float)
    _require(is_number, f"{place}.value of {one.dtype}", value)
    try:
        torch.tensor(value, dtype=BY_NAME[one.dtype])
    except (RuntimeError, ValueError, TypeError, OverflowError):
        _refuse(f"{place}.value of {one.dtype}", value)


# -- tensors ------------------------------------------------------------------------------------------------


def check_tensors(manifest: Manifest, number: int, table: Mapping[str, Located]) -> None:
    """Check that file `number`, with the tensors of `table`, holds what the manifest lists."""
    record = manifest.files[number]
    for one in record.ranges:
        there = table.get(one.tensor)
        if there is None:
            raise ValueError(f"there is no tensor {shown(one.tensor)} in it")
        if there.numel != one.stop - one.start or there.dtype != BY_NAME[one.dtype]:
            raise ValueError(
                f"{shown(one.tensor)} is {list(there.shape)} {there.dtype} and should be "
                f"[{one.stop - one.start}] {one.dtype}"
            )
    for name in [*names_in(record.own), *(names_in(manifest.state) if number == 0 else ())]:
        if name not in table:
            raise ValueError(f"there is no tensor {shown(name)} in it")
    _check_own(OwnValues.of(record.own), manifest.flats, table)


def _check_own(own: OwnValues, flats: tuple[SavedFlat, ...], table: Mapping[str, Located]) -> None:
    for name, saved in own.buffers.items():
        there = table[saved.name]
        flat = next(flat for flat in flats if flat.kind == "buffer" and _first(flat) == name)
        same = kind_of_number(str(there.dtype)) == kind_of_number(flat.dtype)
        if not same or there.shape != flat.slots[0].shape:
            raise ValueError(f"a rank's own {shown(name)} is {list(there.shape)} {there.dtype}")
    for key, grad in own.grads.items():
        there = table[grad.local.name]
        if there.numel != flats[int(key)].numel or not there.dtype.is_floating_point:
            raise ValueError(f"the gradients of flat {key} are {list(there.shape)} {there.dtype}")


def check_own_names(where: str, own: OwnValues, flats: tuple[SavedFlat, ...]) -> None:
    """Check that a rank's own values belong to existing flats."""
    buffers = {_first(flat) for flat in flats if flat.kind == "buffer"}
    for name in own.buffers:
        _require(name in buffers, f"{where}.own: a buffer", name)
    for key, grad in own.grads.items():
        at = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else len(flats)
        _require(
            at < len(flats) and str(at) == key and flats[at].trains, f"{where}.own: grads", key
        )
        _require(
            len(grad.filled) == len(flats[at].slots),
            f"{where}.own: grads[{key}].filled",
            grad.filled,
        )


def _first(flat: SavedFlat) -> str:
    return flat.slots[0].name
