"""The layout of a flat buffer: the place of each parameter and the shard of each rank. Pure arithmetic.

    slots      |--- w0 ---|.|- b0 -|..|------ w1 ------|- n0 -|....|      . = alignment gap, always zero
    segments   |---------- group 0 -------------------|- group 1 -|      one hyperparameter group each
    shards     |------ rank 0 ------|------ rank 1 -----|--- rank 2 ---|  equal sizes, across slots

Slots of one hyperparameter group are contiguous, so an optimizer sees one contiguous 1-D tensor for each
(flat buffer, group). Every boundary is a multiple of 64 bytes; of 256 elements where states have 8 bits, whose
blocks then are in one shard, and are those of the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ops.boxes import Box
from ...ops.flat import ALIGN_NUMEL, align_up, numel_of, overlap
from ...utils.schema.checked_types import Flag, Size, Text


@dataclass(frozen=True)
class ParamEntry:
    """One parameter to be placed: its global name, its shape, its hyperparameter group, its box.

    channels_last: its elements keep this order in the buffer; else they are row-major. Without a box.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    box: Box | None = None
    channels_last: bool = False


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements [offset, offset + numel) of the flat buffer.

    box: where the parameter is a slice of a tensor; None: it is the whole tensor.
    channels_last: dimension 1 is the last one in memory; else the elements are row-major.
    """

    name: Text
    shape: tuple[Size, ...]
    group: Size
    offset: Size
    box: Box | None = None
    channels_last: Flag = False

    @property
    def numel(self) -> int:
        return numel_of(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.numel

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that the slot is, or is a slice of."""
        return self.shape if self.box is None else self.box.whole


@dataclass(frozen=True)
class GroupSegment:
    """Elements [start, stop) that share one hyperparameter group."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """The part of a slot that lies in a range: elements [start, stop) of the range.

    `slot_start`: the first element of the slot that it covers.
    """

    slot: Slot
    start: int
    stop: int
    slot_start: int


@dataclass
class FlatLayout:
    """The plan of one flat buffer of `numel` elements over `world_size` ranks.

    Only `divide` changes it. What belongs to one buffer shares one layout.
    """

    slots: tuple[Slot, ...]
    segments: tuple[GroupSegment, ...]
    numel: int
    world_size: int

    def divide(self, world_size: int) -> None:
        """Have shards of so many ranks. The elements stay where they are."""
        assert self.numel % world_size == 0, "the layout was planned for other numbers of ranks"
        self.world_size = world_size

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    @property
    def payload_numel(self) -> int:
        """Elements that are parameters."""
        return sum(slot.numel for slot in self.slots)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """[start, stop) of the shard that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def gaps(self) -> list[tuple[int, int]]:
        """[start, stop) of every run of padding, in order."""
        found, at = [], 0
        for slot in self.slots:
            if slot.offset > at:
                found.append((at, slot.offset))
            at = slot.stop
        if self.numel > at:
            found.append((at, self.numel))
        return found

    def segments_in(self, start: int, stop: int) -> list[GroupSegment]:
        """The segments clipped to [start, stop), positions relative to `start`."""
        found = []
        for segment in self.segments:
            low, high = overlap((segment.start, segment.stop), (start, stop))
            if low < high:
                found.append(GroupSegment(segment.group, low - start, high - start))
        return found

    def pieces_in(self, start: int, stop: int) -> list[Piece]:
        """The parts of slots that lie in [start, stop), positions relative to `start`."""
        pieces = []
        for slot in self.slots:
            low, high = overlap((slot.offset, slot.stop), (start, stop))
            if low < high:
                pieces.append(Piece(slot, low - start, high - start, low - slot.offset))
        return pieces


def plan_flat(
    entries: Sequence[ParamEntry],
    world_size: int,
    align_numel: int = ALIGN_NUMEL,
    num_parts: int | None = None,
) -> FlatLayout:
    """Lay `entries` out: group by group (stable within a group), every slot and shard aligned.

    align_numel: slots and shards begin at multiples of so many elements.
    num_parts: a multiple of all numbers of ranks that it may be divided over; None: `world_size`.
    """
    slots: list[Slot] = []
    segments: list[GroupSegment] = []
    at = 0
    by_group: dict[int, list[ParamEntry]] = {}
    for entry in entries:
        by_group.setdefault(entry.group, []).append(entry)
    for group in sorted(by_group):
        start = at
        for entry in by_group[group]:
            place = (group, at, entry.box, entry.channels_last)
            slots.append(Slot(entry.name, entry.shape, *place))
            at = align_up(slots[-1].stop, align_numel)
        segments.append(GroupSegment(group, start, at))
    numel = align_up(at, align_numel * (num_parts or world_size))
    # the tail belongs to the last segment: updating zeros is cheaper than an uneven split
    if segments:
        segments[-1] = GroupSegment(segments[-1].group, segments[-1].start, numel)
    return FlatLayout(tuple(slots), tuple(segments), numel, world_size)
