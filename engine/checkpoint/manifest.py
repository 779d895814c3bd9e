"""The manifest of a checkpoint: its fields, their types, and the rules that it satisfies.

    types      pydantic, from the dataclasses' annotations                  when the text is parsed: format.py
    numbers    flats, ranges, constants and files are consistent            `check_numbers`, the same time
    values     the engine's state and the values of each rank               saved_values.py, the same time
    tensors    each file holds the tensors that the manifest lists          `check_tensors`, when it is opened
    whole      nothing is missing that a load needs                         `lacking`, before a load

`verify` and a load share all of them, and all run before anything is changed. Every check raises ValueError,
whose text names the place.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, prod
from typing import Annotated, Any

import torch
from pydantic import Field

from ...ops.boxes import Box
from ...ops.flat import numel_of
from ...ops.mesh import AXES, Axis, Mesh
from ...ops.weights.tensor_table import BY_NAME, Located, is_possible, shown
from ...utils.schema.checked_types import Positive, Size, Text
from ...zero.checkpoint.ranges import (
    CHANNELS_LAST_DIMS,
    COPY,
    ERROR,
    OUTER,
    SERVER,
    Catalogue,
    ConstantRange,
    Range,
    SavedFlat,
    kind_of_number,
    whole_piece,
)
from ...zero.layout.layout import Slot
from .io.tensor_file import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from .packing import unpack
from .saved_values import Named, OwnValues, names_in
from .score import Score

FORMAT, VERSION = "xds-checkpoint", 2
READ_VERSIONS = (1, 2)  # version 1 has no pipeline stages: all ranks hold all flats
MAX_SECONDS = 250_000_000_000  # the year 9892, near the end of Python's dates
MAX_ONES = 64  # dimensions of a tensor of one element
RANK_DIGITS = 7
MAX_NAMES = 20  # in one message
KINDS = ("param", "buffer", "either", "state")
OWN_FILE = r"^rank_[0-9]{5,}-[0-9a-f]{8}\.safetensors$"  # the name of a rank's file
_STATES = [  # of optimizers with the same states for each parameter: a step needs all of a set
    {f"state/{key}" for key in keys}
    for keys in (
        {"step", "exp_avg", "exp_avg_sq"},
        {"step", "exp_avg", "exp_inf"},
        {"step", "square_avg"},
        {"step", "sum"},
        {"exp_avg"},
    )
]
# of checkpoints with totals alone: without them it could be Adam's set that has lost a moment
_DRAWN_LION = {"state/step", "state/exp_avg"}


@dataclass(frozen=True)
class FileRecord:
    """The record of one rank's file.

    path: its name in the checkpoint's folder.
    crc32: one for each `chunk_bytes` of the file; the last chunk may be shorter.
    ranges, constants: the parts of the flat buffers that it holds.
    own: values of this rank alone; their tensors are in the file.
    """

    path: Annotated[str, Field(strict=True, pattern=OWN_FILE)]
    size_bytes: Positive
    chunk_bytes: Annotated[int, Field(strict=True, ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
    crc32: tuple[Annotated[int, Field(strict=True, ge=0, lt=1 << 32)], ...]
    ranges: tuple[Range, ...]
    constants: tuple[ConstantRange, ...]
    own: Any


@dataclass(frozen=True)
class RankPart:
    """What one rank contributes to a manifest. Its numbers of flats are those of its part of the model.

    flats: of the part, from the first rank of a part other than the first; from other ranks none.
    """

    file: FileRecord
    flats: tuple[SavedFlat, ...] = ()


@dataclass(frozen=True)
class SavedNode:
    """Ranks, ascending, whose files are in one folder that no other rank saw. name: of the first one's host."""

    name: Text
    ranks: tuple[Size, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything of a checkpoint except the tensors.

    mesh: how many ranks there are along each axis; file number r is that of rank r.
    experts: how many ranks shared the experts of a layer.
    holders: tuples of ranks, ascending: each flat names one, the ranks that hold its shards, in order.
    state: the engine's values; its tensors are in files[0].
    saved_seconds: when it was saved, in Unix time; 0 if the writer did not record it.
    nodes: of xds 0.1.0, where each node saved into a folder of its own, the nodes by their first rank. Then
        several files may have the same elements, in whole or not at all. All files are in one folder here.
    totals: the elements of each key in all files; older checkpoints do not contain it.
    score: of a save with a metric.
    """

    format: Text
    version: Size
    xds: Text
    tag: Text
    world_size: Positive
    stage: Annotated[int, Field(strict=True, ge=0, le=3)]
    flats: tuple[SavedFlat, ...]
    files: tuple[FileRecord, ...]
    state: Any
    saved_seconds: Annotated[
        float, Field(strict=True, ge=0, lt=MAX_SECONDS, allow_inf_nan=False)
    ] = 0.0
    mesh: dict[Axis, Positive] = field(default_factory=dict)
    holders: tuple[tuple[Size, ...], ...] = ()
    nodes: tuple[SavedNode, ...] = ()
    totals: dict[Text, Size] = field(default_factory=dict)
    score: Score | None = None
    experts: Positive = 1

    @property
    def grid(self) -> Mesh:
        """The ranks that wrote it."""
        return Mesh(**self.mesh, experts=self.experts)

    @property
    def ranges(self) -> list[Range]:
        """All ranges, each element once: of the first node that has it."""
        taken: dict[tuple[int, str], list[tuple[int, int]]] = {}
        kept: list[Range] = []
        for ranks in (node.ranks for node in self.nodes):
            here = [elements for rank in ranks for elements in self.files[rank].ranges]
            fresh = [
                elements
                for elements in here
                if not _covers(taken.get((elements.flat, elements.key), []), elements)
            ]
            for elements in fresh:
                taken.setdefault((elements.flat, elements.key), []).append(
                    (elements.start, elements.stop)
                )
            kept += fresh
        return (
            kept
            if self.nodes
            else [elements for record in self.files for elements in record.ranges]
        )

    def holders_of(self, flat: SavedFlat) -> tuple[int, ...]:
        """The ranks that hold the shards of `flat`, in order."""
        return self.holders[flat.held_by]

    @property
    def global_steps(self) -> int:
        """Optimizer steps taken before the save."""
        return int(self.state["counters"]["global_steps"])

    @property
    def micro_steps(self) -> int:
        """Micro-batches processed before the save."""
        return int(self.state["counters"]["micro_steps"])


def _covers(spans: list[tuple[int, int]], elements: Range) -> bool:
    start = elements.start
    for low, high in sorted(spans):
        if low <= start < high:
            start = high
    return start >= elements.stop


def totals_of(files: Iterable[FileRecord]) -> dict[str, int]:
    """The `totals` of a manifest."""
    totals: dict[str, int] = {}
    for record in files:
        parts: tuple[Range | ConstantRange, ...] = (*record.ranges, *record.constants)
        for elements in parts:
            totals[elements.key] = totals.get(elements.key, 0) + elements.stop - elements.start
    return totals


def lengths_of(mesh: Mesh) -> dict[Axis, int]:
    """The `mesh` of a manifest."""
    return dict(zip(AXES, mesh.shape, strict=True))


def new_manifest(
    *,
    tag: str,
    stage: int,
    mesh: Mesh,
    flats: tuple[SavedFlat, ...],
    files: tuple[FileRecord, ...],
    holders: tuple[tuple[int, ...], ...],
    state: Any,
) -> Manifest:
    """A manifest of this version and time."""
    from ...utils.version import __version__

    return Manifest(
        format=FORMAT,
        version=VERSION,
        xds=__version__,
        tag=tag,
        world_size=len(files),
        stage=stage,
        flats=flats,
        files=files,
        state=state,
        saved_seconds=time.time(),
        mesh=lengths_of(mesh),
        holders=holders,
        totals=totals_of(files),
        experts=mesh.experts,
    )


# -- numbers ------------------------------------------------------------------------------------------------


def check_numbers(manifest: Manifest) -> None:
    """Check that flats, ranges, constants and files are consistent."""
    _check_mesh(manifest)
    _check_flats(manifest.flats, len(manifest.holders))
    _check_files(manifest)
    totals = totals_of(manifest.files)
    for key in sorted({*totals, *manifest.totals}) if manifest.totals else ():
        written, saved = totals.get(key, 0), manifest.totals.get(key, 0)
        if written != saved:
            raise ValueError(
                f"its files have {written} elements of {shown(key)}, and {saved} were saved"
            )


def _require(is_right: Any, value: Any, where: str, *places: Any) -> None:
    """`where` has a "{}" for each of `places`: the text is built only for an error."""
    if not is_right:
        place = where.format(*(shown(one) if isinstance(one, str) else one for one in places))
        raise ValueError(f"{place} is {shown(value)}, which does not fit the rest of it")


def _require_dtype(name: str, where: str, *places: Any) -> None:
    if name not in BY_NAME:
        raise ValueError(
            f"{where.format(*places)} is the dtype {shown(name)}, which this torch does not have, or no "
            "checkpoint holds"
        )


def _rises(numbers: Iterable[int]) -> bool:
    return all(before < after for before, after in pairwise(numbers))


def _check_mesh(manifest: Manifest) -> None:
    mesh, num_files = manifest.mesh, len(manifest.files)
    _require(sorted(mesh) == sorted(AXES), mesh, "mesh")
    if not manifest.world_size == prod(mesh.values()) == num_files:
        lengths = " x ".join(f"{axis} {mesh[axis]}" for axis in AXES)
        raise ValueError(
            f"it has the files of {num_files} ranks and should have those of {prod(mesh.values())} "
            f"({lengths}), with world_size {shown(manifest.world_size)}"
        )
    _require(num_files // mesh["pipe"] % manifest.experts == 0, manifest.experts, "experts")
    for number, ranks in enumerate(manifest.holders):
        fits = ranks and _rises(ranks) and ranks[-1] < num_files
        _require(fits, ranks, "holders[{}]", number)
    for number, node in enumerate(manifest.nodes):
        _require(node.ranks and _rises(node.ranks), node.ranks, "nodes[{}].ranks", number)
    node_ranks = sorted(rank for node in manifest.nodes for rank in node.ranks)
    if manifest.nodes:
        _require(node_ranks == list(range(num_files)), node_ranks, "the ranks of nodes")


def _check_flats(flats: Iterable[SavedFlat], num_holders: int) -> None:
    by_name: dict[tuple[bool, str], list[tuple[SavedFlat, Slot]]] = {}
    for number, flat in enumerate(flats):
        _require(flat.kind in KINDS, flat.kind, "flats[{}].kind", number)
        _require_dtype(flat.dtype, "flats[{}].dtype", number)
        _require(flat.held_by < num_holders, flat.held_by, "flats[{}].held_by", number)
        for slot in flat.slots:
            _check_slot(number, flat, slot)
            same = by_name.setdefault((flat.kind == "state", slot.name), [])
            is_new = not same or slot.box is not None
            _require(is_new, slot.name, "flats[{}]: the name of a slot", number)
            same.append((flat, slot))
        if flat.kind != "param":
            is_one = len(flat.slots) == 1 and flat.slots[0].numel == flat.numel
            _require(is_one, len(flat.slots), "flats[{}], a {}: slots", number, flat.kind)
        full = sorted((slot for slot in flat.slots if slot.numel), key=lambda slot: slot.offset)
        for before, after in pairwise(full):
            is_same = (before.offset, before.stop) == (after.offset, after.stop)
            fits = before.stop <= after.offset or is_same
            _require(fits, after.offset, "flats[{}], {}: offset", number, after.name)
        names = {slot.name for slot in flat.slots}
        for _, name in flat.tied:
            _require(name in names, name, "flats[{}].tied", number)
    for slices in by_name.values():
        if len(slices) > 1 or slices[0][1].box is not None:
            _check_slices(slices)


def _check_slot(number: int, flat: SavedFlat, slot: Slot) -> None:
    fits = is_possible(slot.shape) and slot.stop <= flat.numel
    _require(fits, slot.shape, "flats[{}], {}: shape or offset", number, slot.name)
    has_key = flat.kind != "state" or "/" in slot.name
    _require(has_key, slot.name, "flats[{}]: the name of a slot", number)
    if slot.channels_last:
        fits = flat.kind == "param" and len(slot.shape) in CHANNELS_LAST_DIMS and slot.box is None
        _require(fits, slot.shape, "flats[{}], {}: channels_last", number, slot.name)
    if slot.box is not None:
        fits = flat.kind == "param" and _is_slice(slot, slot.box)
        _require(fits, slot.box.ranges[:4], "flats[{}], {}: box", number, slot.name)


def _is_slice(slot: Slot, box: Box) -> bool:
    """The box is inside the whole tensor, and has the shape of the slot; an empty one has the range (0, 0)."""
    if not is_possible(box.whole) or box.dim >= len(box.whole) or not box.ranges:
        return False
    ends = [end for ends in box.ranges for end in ends]
    rises = all(start < stop for start, stop in box.ranges) and ends == sorted(ends)
    rises = rises or box.ranges == ((0, 0),)
    return rises and ends[-1] <= box.whole[box.dim] and box.shape == slot.shape


def _check_slices(slices: list[tuple[SavedFlat, Slot]]) -> None:
    """Check that slots of one name are slices of one tensor which have no element in common."""
    boxes = [slot.box for _, slot in slices if slot.box is not None]
    name = slices[0][1].name
    is_one = len(boxes) == len(slices) and len({(box.whole, box.dim) for box in boxes}) == 1
    _require(is_one, [box.whole for box in boxes][:4], "the slices of {}", name)
    same = {(flat.kind, flat.trains, flat.dtype, flat.has_values) for flat, _ in slices}
    _require(len(same) == 1, sorted(map(str, same)), "the buffers with slices of {}", name)
    for before, after in pairwise(sorted(span for box in boxes for span in box.ranges)):
        _require(before[1] <= after[0], [before, after], "the slices of {}: ranges", name)


def _check_files(manifest: Manifest) -> None:
    flats = manifest.flats
    holders = [frozenset(ranks) for ranks in manifest.holders]
    paths: set[str] = set()
    dtypes: dict[tuple[int, str], str] = {}
    for number, record in enumerate(manifest.files):
        _require(record.path not in paths, record.path, "files[{}].path", number)
        paths.add(record.path)
        size, chunk = record.size_bytes, record.chunk_bytes
        _require(chunk & (chunk - 1) == 0, chunk, "files[{}].chunk_bytes", number)
        count = len(record.crc32)
        _require(count == -(-size // chunk), count, "the number of files[{}].crc32", number)
        _check_ranges(number, record, flats, dtypes)
        for place, constant in enumerate(record.constants):
            _check_constant((number, place), constant, flats)
        for flat in {elements.flat for elements in record.ranges} | {
            elements.flat for elements in record.constants
        }:
            if number not in holders[flats[flat].held_by]:
                name = flats[flat].slots[0].name if flats[flat].slots else ""
                raise ValueError(
                    f"the file of rank {number} has a part of flats[{flat}] ({shown(name)}), which is held "
                    f"by the ranks {shown(list(manifest.holders_of(flats[flat])))}"
                )


def _check_ranges(
    number: int,
    record: FileRecord,
    flats: tuple[SavedFlat, ...],
    dtypes: dict[tuple[int, str], str],
) -> None:
    size_bytes = 0
    tensors: set[str] = set()
    for position, elements in enumerate(record.ranges):
        where = (number, position)
        _require_dtype(elements.dtype, "files[{}].ranges[{}].dtype", *where)
        place = (elements.flat, elements.start, elements.stop)
        _require(
            _is_place(elements, flats), place, "files[{}].ranges[{}]: flat, start, stop", *where
        )
        is_new = elements.file == number and elements.tensor not in tensors
        _require(
            is_new, (elements.file, elements.tensor), "files[{}].ranges[{}]: file or tensor", *where
        )
        fits = _is_key(elements, flats[elements.flat])
        fits = (
            fits
            and dtypes.setdefault((elements.flat, elements.key), elements.dtype) == elements.dtype
        )
        _require(fits, (elements.key, elements.dtype), "files[{}].ranges[{}]: key or dtype", *where)
        tensors.add(elements.tensor)
        size_bytes += (elements.stop - elements.start) * BY_NAME[elements.dtype].itemsize
    fits = size_bytes <= record.size_bytes
    _require(fits, record.size_bytes, "files[{}].size_bytes", number)


def _is_place(elements: Range | ConstantRange, flats: tuple[SavedFlat, ...]) -> bool:
    return (
        elements.flat < len(flats) and elements.start < elements.stop <= flats[elements.flat].numel
    )


def _is_key(elements: Range, flat: SavedFlat) -> bool:
    if flat.kind == "state":
        return elements.key == f"state/{flat.slots[0].name.rpartition('/')[2]}"
    if elements.key == "value":
        return elements.dtype == flat.dtype or kind_of_number(elements.dtype) == kind_of_number(
            flat.dtype
        )
    if elements.key in (SERVER, COPY) or elements.key.startswith(ERROR):
        rank = elements.key.removeprefix(ERROR)
        is_known = elements.key in (SERVER, COPY) or (rank.isdecimal() and len(rank) <= RANK_DIGITS)
        return flat.trains and is_known and kind_of_number(elements.dtype) == "float"
    if elements.key in OUTER:
        return flat.trains and elements.dtype == "float32"
    return flat.trains if elements.key == "grad" else elements.key.startswith("state/")


def _check_constant(
    place: tuple[int, int], constant: ConstantRange, flats: tuple[SavedFlat, ...]
) -> None:
    where = "files[{}].constants[{}]"
    numbers = (constant.flat, constant.start, constant.stop)
    _require(_is_place(constant, flats), numbers, f"{where}: flat, start, stop", *place)
    _require(constant.key.startswith("state/"), constant.key, f"{where}.key", *place)
    is_one = len(constant.shape) <= MAX_ONES and numel_of(constant.shape) == 1
    _require(is_one, constant.shape, f"{where}.shape", *place)
    value = unpack(constant.value, Named)
    fits = value is None or isinstance(value, bool | int | float | str)
    if constant.key == "state/step" and isinstance(value, int | float):
        fits = 0 <= value < inf
    if constant.dtype is not None:
        _require_dtype(constant.dtype, f"{where}.dtype", *place)
        try:
            fits = fits and isinstance(value, bool | int | float)
            torch.tensor(value if fits else 0, dtype=BY_NAME[constant.dtype])
        except (RuntimeError, ValueError, TypeError, OverflowError):
            fits = False
    _require(fits, value, f"{where}.value", *place)


# -- tensors ------------------------------------------------------------------------------------------------


def check_tensors(manifest: Manifest, number: int, table: Mapping[str, Located]) -> None:
    """Check that file `number`, with the tensors of `table`, holds what the manifest lists."""
    record, flats = manifest.files[number], manifest.flats
    state = names_in(manifest.state) if number == 0 else ()
    for name in (*(elements.tensor for elements in record.ranges), *names_in(record.own), *state):
        if name not in table:
            raise ValueError(f"there is no tensor {shown(name)} in it")
    for elements in record.ranges:
        there = table[elements.tensor]
        if there.numel != elements.stop - elements.start or there.dtype != BY_NAME[elements.dtype]:
            raise ValueError(
                f"{shown(elements.tensor)} is {list(there.shape)} {there.dtype} and should be "
                f"[{elements.stop - elements.start}] {elements.dtype}"
            )
    own = OwnValues.of(record.own)
    for name, saved in own.buffers.items():
        there, flat = table[saved.name], _buffers(flats)[name]
        same = kind_of_number(str(there.dtype)) == kind_of_number(flat.dtype)
        if not same or there.shape != flat.slots[0].shape:
            raise ValueError(f"a rank's own {shown(name)} is {list(there.shape)} {there.dtype}")
    for key, grad in own.grads.items():
        there = table[grad.local.name]
        if there.numel != flats[int(key)].numel or not there.dtype.is_floating_point:
            raise ValueError(f"the gradients of flat {key} are {list(there.shape)} {there.dtype}")


def check_own(number: int, own: OwnValues, flats: tuple[SavedFlat, ...]) -> None:
    """Check that a rank's own values belong to existing flats."""
    known = _buffers(flats) if own.buffers else {}
    for name in own.buffers:
        _require(name in known, name, "files[{}].own: a buffer", number)
    training = (
        {str(flat_number): flat for flat_number, flat in enumerate(flats) if flat.trains}
        if own.grads
        else {}
    )
    for key, grad in own.grads.items():
        _require(key in training, key, "files[{}].own: grads", number)
        fits = len(grad.filled) == len(training[key].slots)
        _require(fits, grad.filled, "files[{}].own: grads[{}].filled", number, key)


def _buffers(flats: Iterable[SavedFlat]) -> dict[str, SavedFlat]:
    return {flat.slots[0].name: flat for flat in flats if flat.kind == "buffer"}


# -- whole --------------------------------------------------------------------------------------------------


def lacking(manifest: Manifest, catalogue: Catalogue, *, with_optimizer: bool = True) -> list[str]:
    """Names of what is in no file: "blocks.0.weight", or "blocks.0.weight (state/exp_avg)".

    values                 every element of every parameter and buffer, unless they were left out on request
    optimizer states       of a parameter: each for all of its elements, and all that a step needs, or none
    what was not sent      the errors of all ranks of a buffer, or of none
    """
    names = catalogue.uncovered()
    sets = [*_STATES, _DRAWN_LION] if manifest.totals else _STATES
    for flat in manifest.flats if with_optimizer else ():
        if flat.kind == "param" and flat.trains:
            names += _lacking_of(flat, catalogue, len(manifest.holders_of(flat)), sets)
    return list(dict.fromkeys(names))


def _lacking_of(
    flat: SavedFlat, catalogue: Catalogue, num_ranks: int, sets: Iterable[set[str]]
) -> Iterator[str]:
    for slot in flat.slots:
        whole = whole_piece("param", slot)
        numel = whole.stop
        if not numel:
            continue
        numels = catalogue.numels_of(whole)
        keys = set(numels)
        states = {key for key in keys if key.startswith("state/")}
        # steps alone say nothing: Adafactor has states of other shapes beside them
        if states - {"state/step"}:
            keys |= min(
                (of_optimizer for of_optimizer in sets if states <= of_optimizer),
                key=len,
                default=set(),
            )
        if any(key.startswith(ERROR) for key in keys):
            keys |= {f"{ERROR}{rank}" for rank in range(num_ranks)}
        for key in sorted(keys - {"value"}):
            if numels.get(key, 0) < numel:
                yield f"{slot.name} ({key})"


def some_of(names: Iterable[str]) -> str:
    """The first names for a message, and how many more there are."""
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - MAX_NAMES} more" if len(unique) > MAX_NAMES else ""
    return ", ".join(unique[:MAX_NAMES]) + more
