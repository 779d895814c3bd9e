"""The mapping from elements to ranges of checkpoint files, as pure arithmetic without files.

    saved    flat 0   |----- a -----|.|--- b ---|..|     files    |--- file 0 ---|--- file 1 ---|
    wanted   flat 5   |--- b ---|.|----- a -----|...     this rank's part   |---------|
                      -> copies: file 1, elements [3, 9) to [0, 6); ...      . = alignment gap

Every tensor of a checkpoint is a range of a flat buffer (a flat), and the slots of a flat name its elements.
So another layout finds elements by name and reads only those that it needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic, TypeVar, final

from ...ops.boxes import Box
from ...ops.flat import cut, numel_of, overlap
from ...utils.schema.checked_types import Flag, Size, Text
from ..layout.layout import Slot
from ..layout.slices import StridedRuns, clipped, common_runs, runs_to_channels_last

OUTER = ("outer/value", "outer/momentum", "outer/error")  # of groups that train alone
ERROR, SERVER, COPY = "error/", "server", "copy"  # keys of pending errors, see pending_errors.py
CHANNELS_LAST_DIMS = (4, 5)  # of a tensor that torch calls channels_last
SPLIT_NUMEL = 1 << 16  # elements per rank; a smaller flat is written by a single rank


@dataclass(frozen=True)
class SavedFlat:
    """One flat buffer, or one separate tensor, which has one slot.

    kind: "param"; "buffer" of a module; "either", an imported tensor that is one of the two;
        "state", an optimizer's tensor that is not per element, with the slot name "parameter/key".
    dtype: of the computation, as "float32"; the values may be saved with more bits.
    has_values: False if the values were left out of the files (frozen parameters, on request).
    tied: other names of parameters or buffers in a state dict: pairs (other name, name of its slot).
    held_by: the number, in the manifest's `holders`, of the ranks that hold its shards.
    """

    kind: Text
    trains: Flag
    dtype: Text
    numel: Size
    slots: tuple[Slot, ...]
    has_values: Flag = True
    tied: tuple[tuple[Text, Text], ...] = ()
    held_by: Size = 0


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of flat number `flat`, of what `key` names, are tensor `tensor` of file `file`.

    key: "value", "grad", "state/" and the optimizer's own key, or one of pending_errors.py.
    """

    flat: Size
    key: Text
    start: Size
    stop: Size
    file: Size
    tensor: Text
    dtype: Text


@dataclass(frozen=True)
class ConstantRange:
    """All elements [start, stop) of a flat share one value of `key`, such as an optimizer's step count.

    dtype: of a tensor with one element and `shape`, else None; on_device: it is on the masters' device.
    """

    flat: Size
    key: Text
    start: Size
    stop: Size
    value: Any  # a number, bool, string or None
    dtype: Text | None = None
    on_device: Flag = False
    shape: tuple[Size, ...] = ()


@dataclass(frozen=True)
class Copy:
    """Copy `numel` elements from element `source` of a file's tensor to element `target` of the receiver.

    With `count` > 1 so many such runs, whose places differ by `source_step` and `target_step`.
    """

    file: int
    tensor: str
    dtype: str
    source: int
    target: int
    numel: int
    count: int = 1
    source_step: int = 0
    target_step: int = 0

    @property
    def total_numel(self) -> int:
        return self.numel * self.count

    @property
    def source_numel(self) -> int:
        """Elements of the file's tensor from the first to the last that is copied."""
        return (self.count - 1) * self.source_step + self.numel

    @property
    def runs(self) -> StridedRuns:
        """`here`: in the file's tensor. `there`: in the receiver."""
        steps = self.source_step, self.target_step
        return StridedRuns(self.source, self.target, self.numel, self.count, *steps)


@dataclass(frozen=True)
class TargetPiece:
    """Elements [start, stop) of the parameter or buffer `name`, which begin at `target` of the receiver.

    box: they are elements of this slice of it; None: of the whole.
    channels_last: the order in which elements are counted; else they are row-major.
    """

    kind: str
    name: str
    start: int
    stop: int
    target: int
    box: Box | None = None
    channels_last: bool = False


@dataclass(frozen=True)
class Differences:
    """The differences between a model and a checkpoint: names, and messages about shapes."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    shapes: tuple[str, ...]


Held = TypeVar("Held", Range, ConstantRange)
# the number of a flat, and a slot of it; slices of one tensor have several
_Place = tuple[int, Slot]


def kind_of_number(dtype: str) -> str:
    """ "float", "complex" or "whole" (integers); values may be converted within a kind."""
    return next((kind for kind in ("float", "complex") if kind in dtype), "whole")


@final
class _Index(Generic[Held]):
    """Finds ranges by flat, key and position."""

    def __init__(self, ranges: Iterable[Held]) -> None:
        self._sorted: dict[int, dict[str, list[Held]]] = {}
        for elements in ranges:
            self._sorted.setdefault(elements.flat, {}).setdefault(elements.key, []).append(elements)
        for keys in self._sorted.values():
            for key, same_key in keys.items():
                same_key.sort(key=lambda elements: elements.start)
                for before, after in pairwise(same_key):
                    if before.stop > after.start:
                        raise ValueError(f"two ranges of {key} claim element {after.start}")

    def keys(self, flat: int) -> Iterable[str]:
        return self._sorted.get(flat, {})

    def between(self, flat: int, key: str, start: int, stop: int) -> Iterator[Held]:
        """The ranges that have an element in [start, stop), in order."""
        in_order = self._sorted.get(flat, {}).get(key, [])
        following = bisect_right(in_order, start, key=lambda elements: elements.start)
        for elements in in_order[max(following - 1, 0) :]:
            if elements.start >= stop:
                return
            if elements.stop > start:
                yield elements


@final
class Catalogue:
    """Finds elements in a checkpoint by name.

    Raises:
        ValueError: two ranges claim the same elements.
    """

    def __init__(
        self,
        flats: Sequence[SavedFlat],
        ranges: Iterable[Range],
        constants: Iterable[ConstantRange] = (),
    ) -> None:
        self._flats = flats
        self._places: dict[tuple[str, str], list[_Place]] = {}
        for number, flat in enumerate(flats):
            for slot in flat.slots:
                if slot.numel or slot.box is None:  # of an empty slice other flats have elements
                    self._places.setdefault((flat.kind, slot.name), []).append((number, slot))
        self._tied = {
            (flat.kind, other): self._places[flat.kind, name]
            for flat in flats
            for other, name in flat.tied
            if (flat.kind, name) in self._places
        }
        self._whole_states: dict[str, list[str]] = {}
        for kind, name in self._places:
            if kind == "state":
                self._whole_states.setdefault(name.rpartition("/")[0], []).append(name)
        self._ranges = _Index(ranges)
        self._constants = _Index(constants)

    def states_of(self, param: str) -> list[str]:
        """The names "param/key" of the states that belong to the whole parameter `param`."""
        return self._whole_states.get(param, [])

    def flat_of(self, kind: str, name: str) -> SavedFlat:
        """The flat that holds `name`, or its first slice; the checkpoint has it."""
        return self._flats[self._places[kind, name][0][0]]

    def find(self, kind: str, name: str) -> SavedFlat | None:
        """The flat that holds `name`, which may be one of several names of it; None: there is none."""
        places = self._places_of(kind, name)
        return self._flats[places[0][0]] if places else None

    def whole(self, kind: str, name: str) -> TargetPiece:
        """All of `name`, in the order that it was saved in; the checkpoint has it."""
        return whole_piece(kind, self._places[kind, name][0][1])

    def number_of(self, flat: SavedFlat) -> int | None:
        """The number of the flat that begins with the same slot; None: there is none."""
        first = next((slot for slot in flat.slots if slot.numel), None)
        if first is None:
            return None
        places = self._places_of(flat.kind, first.name)
        return next((number for number, slot in places if slot.box == first.box), None)

    def orders_of(self, number: int) -> list[bool]:
        """For each slot of flat `number`, whether its elements are saved as channels_last."""
        return [slot.channels_last for slot in self._flats[number].slots]

    def group_of(self, param: str) -> int | None:
        """The hyperparameter group of a parameter that was trained."""
        trained = [slot for n, slot in self._places_of("param", param) if self._flats[n].trains]
        return trained[0].group if trained else None

    def copies(self, piece: TargetPiece, key: str) -> list[Copy]:
        """The copies of the elements of `piece`, without elements that the checkpoint does not have."""
        copies = []
        for number, slot, runs in self._parts(piece):
            low, high = slot.offset + runs.there, slot.offset + runs.there_stop
            for elements in self._ranges.between(number, key, low, high):
                inside = (elements.start - slot.offset, elements.stop - slot.offset)
                for part in clipped(runs.turned(), *inside):
                    copies.append(_copy(elements, part, slot, piece))
        return copies

    def uncovered(self) -> list[str]:
        """Names of which the checkpoint lacks some element."""
        names = []
        for (kind, name), places in self._places.items():
            number, slot = places[0]
            key = f"state/{name.rpartition('/')[2]}" if kind == "state" else "value"
            whole = whole_piece(kind, slot)
            copies = self.copies(whole, key)
            if self._flats[number].has_values and sum(c.total_numel for c in copies) != whole.stop:
                names.append(name)
        return names

    def keys_of(self, piece: TargetPiece) -> dict[str, str]:
        """Key -> dtype of all ranges in the checkpoint that overlap `piece`."""
        dtypes = {}
        for number, low, high in self._spans(piece):
            for key in self._ranges.keys(number):
                for elements in self._ranges.between(number, key, low, high):
                    dtypes[key] = elements.dtype
        return dtypes

    def numels_of(self, piece: TargetPiece) -> dict[str, int]:
        """Key -> elements of `piece` that the checkpoint has of it, in ranges or as constants."""
        numels: dict[str, int] = {}
        for number, slot, runs in self._parts(piece):
            low, high = slot.offset + runs.there, slot.offset + runs.there_stop
            for index in (self._ranges, self._constants):
                for key in index.keys(number):
                    for elements in index.between(number, key, low, high):
                        inside = (elements.start - slot.offset, elements.stop - slot.offset)
                        parts = clipped(runs.turned(), *inside)
                        numel = sum(part.count * part.numel for part in parts)
                        numels[key] = numels.get(key, 0) + numel
        return numels

    def constants_of(self, piece: TargetPiece) -> list[ConstantRange]:
        """Every constant that applies to an element of `piece`."""
        return [
            constant
            for number, low, high in self._spans(piece)
            for key in self._constants.keys(number)
            for constant in self._constants.between(number, key, low, high)
        ]

    def _spans(self, piece: TargetPiece) -> Iterator[tuple[int, int, int]]:
        """For each part of `piece`, its flat, and from which element to which it lies there."""
        for number, slot, runs in self._parts(piece):
            yield number, slot.offset + runs.there, slot.offset + runs.there_stop

    def _parts(self, piece: TargetPiece) -> Iterator[tuple[int, Slot, StridedRuns]]:
        """The elements of `piece` (`here`) in every slot that has some of them (`there`)."""
        for number, slot in self._places_of(piece.kind, piece.name):
            for runs in _common(piece, slot):
                for part in clipped(runs, piece.start, piece.stop):
                    yield number, slot, part

    def _places_of(self, kind: str, name: str) -> Sequence[_Place]:
        """The places of a name, which may be one of several names of a tied parameter."""
        for kinds in (kind,) if kind == "state" else (kind, "either"):
            for places in (self._places, self._tied):
                if (kinds, name) in places:
                    return places[kinds, name]
        return ()

    def _place(self, kind: str, name: str) -> _Place | None:
        """The first place of a name: the same object for all names of a tensor and all of its slices."""
        return next(iter(self._places_of(kind, name)), None)

    def met(self, flats: Sequence[SavedFlat]) -> str:
        """One "0" or "1" for each tensor of the checkpoint: "1" if `flats` have its elements."""
        known = {self._place(flat.kind, slot.name) for flat in flats for slot in flat.slots}
        spots = {(place[0], place[1].offset) for place in known if place is not None}
        return "".join(
            "1" if (places[0][0], places[0][1].offset) in spots else "0"
            for places in self._places.values()
        )

    def compare(self, flats: Sequence[SavedFlat], met_elsewhere: str = "") -> Differences:
        """Parameters and buffers that only `flats` or only the checkpoint has, or whose shapes differ.

        met_elsewhere: "1" for each tensor that other ranks have, as `met` returns it.
        """
        model_shapes = {
            (f.kind, s.name): s.whole_shape for f in flats for s in f.slots if f.kind != "state"
        }
        saved = {place: self._place(*place) for place in model_shapes}
        met = {
            (saved_as[0], saved_as[1].offset) for saved_as in saved.values() if saved_as is not None
        }
        met.update(
            (places[0][0], places[0][1].offset)
            for places, mark in zip(self._places.values(), met_elsewhere, strict=False)
            if mark == "1"
        )
        dtypes = {(f.kind, s.name): f.dtype for f in flats for s in f.slots}
        return Differences(
            missing=tuple(
                sorted(name for (_, name), saved_as in saved.items() if saved_as is None)
            ),
            extra=tuple(
                sorted(
                    name
                    for (kind, name), ((number, slot), *_) in self._places.items()
                    if kind != "state" and slot.numel and (number, slot.offset) not in met
                )
            ),
            shapes=tuple(
                f"{name} is {list(saved_as[1].whole_shape)} in the checkpoint and "
                f"{list(model_shapes[kind, name])} in the model"
                for (kind, name), saved_as in saved.items()
                if saved_as is not None and saved_as[1].whole_shape != model_shapes[kind, name]
            )
            + tuple(
                f"{place[1]} is {self._flats[saved_as[0]].dtype} in the checkpoint and "
                f"{dtypes[place]} in the model"
                for place, saved_as in saved.items()
                if saved_as is not None
                and kind_of_number(self._flats[saved_as[0]].dtype) != kind_of_number(dtypes[place])
            ),
        )


def pieces(flat: SavedFlat, start: int, stop: int) -> list[TargetPiece]:
    """The parts of slots that lie in [start, stop) of `flat`; targets count from `start`."""
    targets = []
    for slot in flat.slots:
        low, high = overlap((slot.offset, slot.stop), (start, stop))
        if low < high:
            inside = (low - slot.offset, high - slot.offset)
            order = slot.box, slot.channels_last
            targets.append(TargetPiece(flat.kind, slot.name, *inside, low - start, *order))
    return targets


def whole_piece(kind: str, slot: Slot) -> TargetPiece:
    """All of the tensor that `slot` is, or is a slice of, in the order that it was saved in."""
    numel = numel_of(slot.whole_shape)
    return TargetPiece(kind, slot.name, 0, numel, 0, channels_last=slot.channels_last)


def _common(piece: TargetPiece, slot: Slot) -> list[StridedRuns]:
    """The elements that `piece` (`here`) and `slot` (`there`) have in common."""
    shape = slot.whole_shape
    if piece.channels_last == slot.channels_last or len(shape) not in CHANNELS_LAST_DIMS:
        return common_runs(piece.box, slot.box, shape)
    if piece.box is not None or slot.box is not None:
        return []  # tensor ranks cut no convolutions
    runs = runs_to_channels_last(shape)
    return [run.turned() for run in runs] if piece.channels_last else runs


def _copy(elements: Range, part: StridedRuns, slot: Slot, piece: TargetPiece) -> Copy:
    """The copy of `part`, whose `here` is in the slot and `there` in the tensor of `piece`."""
    source = slot.offset + part.here - elements.start
    target = piece.target + part.there - piece.start
    steps = part.here_step, part.there_step
    return Copy(
        elements.file,
        elements.tensor,
        elements.dtype,
        source,
        target,
        part.numel,
        part.count,
        *steps,
    )


def merged(copies: Sequence[Copy]) -> list[Copy]:
    """The same copies; copies that are adjacent in the file and at the target become one."""
    joined: list[Copy] = []
    for copy in copies:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.count == copy.count == 1
            and (last.file, last.tensor) == (copy.file, copy.tensor)
            and last.source + last.numel == copy.source
            and last.target + last.numel == copy.target
        ):
            joined[-1] = replace(last, numel=last.numel + copy.numel)
        else:
            joined.append(copy)
    return joined


def share(flat: SavedFlat, rank: int, world_size: int, turn: int) -> tuple[int, int]:
    """[start, stop) of `flat` that `rank` of `world_size` holders writes, if each of them has all of it.

    Rank 0 writes buffers of modules. Small flats are each written by one rank, in turn by `turn`.
    """
    if flat.kind == "buffer":
        return (0, flat.numel) if rank == 0 else (0, 0)
    if flat.numel < SPLIT_NUMEL * world_size:
        return (0, flat.numel) if turn % world_size == rank else (0, 0)
    return cut(flat.numel, world_size)[rank]


def share_of_replica(
    shard: tuple[int, int], replica: tuple[int, int], turn: int
) -> tuple[int, int]:
    """[start, stop) of `shard` that this rank writes. replica: its number, and how many have the shard.

    Small shards are each written by one replica, in turn by `turn`.
    """
    number, count = replica
    start, stop = shard
    if stop - start < SPLIT_NUMEL * count:
        return shard if turn % count == number else (start, start)
    low, high = cut(stop - start, count)[number]
    return start + low, start + high
