"""Blocks of an `affine` map as boxes: what affine_transfer.py can plan with, and checks of a whole map.

    piece  ->  Block: a box of the whole parameter, and a box of equal size in the shard of one rank

Time and memory depend on the number of pieces, never on the size of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import final

from ...utils.errors import UsageError
from .affine_maps import AffinePiece, ParamAffineMap, row_major_strides

Numbers = tuple[int, ...]


class AffineTransferError(UsageError, ValueError):
    """There is no plan."""


class InvalidMapError(AffineTransferError):
    """A map contradicts itself, or the other map."""


class UnsupportedLayoutError(AffineTransferError):
    """A right map that the planner cannot express; rebuild the parameter instead."""


class InvalidReplicaPolicyError(AffineTransferError):
    """The function that chooses a source rank returned one that does not have the block."""


@dataclass(frozen=True)
class PlanBudget:
    """Limits of a plan: a map with too many pieces is an error, and not a wait."""

    max_ndim: int = 8
    max_pieces_per_map: int = 1 << 12
    max_pair_checks: int = 1 << 18
    max_segments: int = 1 << 16
    max_merge_passes: int = 8
    max_plan_bytes: int = 1 << 24
    max_merge_checks: int = 1 << 18

    def check(self, name: str, count: int) -> None:
        """Raise AffineTransferError where `count` exceeds the limit `name`."""
        limit = getattr(self, name)
        if count > limit:
            raise AffineTransferError(f"the plan needs {count}, which exceeds {name} = {limit}")


@final
@dataclass(frozen=True, order=True)
class LogicalBox:
    """The elements from `origin` on, `extent` of them in each dimension."""

    origin: Numbers
    extent: Numbers

    @property
    def volume(self) -> int:
        return prod(self.extent)

    @property
    def is_empty(self) -> bool:
        return not self.volume

    def upper(self) -> Numbers:
        """The first number in each dimension that is not in the box."""
        return tuple(low + size for low, size in zip(self.origin, self.extent, strict=True))

    def intersection(self, other: LogicalBox) -> LogicalBox:
        low = tuple(map(max, self.origin, other.origin))
        high = tuple(map(min, self.upper(), other.upper()))
        return LogicalBox(low, tuple(max(0, b - a) for a, b in zip(low, high, strict=True)))

    def meets(self, other: LogicalBox) -> bool:
        return not self.intersection(other).is_empty

    def contains(self, other: LogicalBox) -> bool:
        return self.intersection(other) == other

    def without(self, other: LogicalBox) -> list[LogicalBox]:
        """The rest of this box as boxes that have no element in common."""
        cut, rest, found = self.intersection(other), self, []
        if cut.is_empty:
            return [self]
        for axis in range(len(self.extent)):
            ends = (rest.origin[axis], cut.origin[axis], cut.upper()[axis], rest.upper()[axis])
            before, inside, after = (
                rest._along(axis, start, stop)
                for start, stop in zip(ends[:-1], ends[1:], strict=True)
            )
            found += [box for box in (before, after) if not box.is_empty]
            rest = inside
        return found

    def _along(self, axis: int, start: int, stop: int) -> LogicalBox:
        origin = (*self.origin[:axis], start, *self.origin[axis + 1 :])
        return LogicalBox(origin, (*self.extent[:axis], stop - start, *self.extent[axis + 1 :]))


@final
@dataclass(frozen=True)
class Block:
    """One piece of a rank: `box` in the whole parameter, `local` in the shard, which has these strides."""

    rank: int
    locations: frozenset[int]
    box: LogicalBox
    local: LogicalBox
    strides: Numbers

    def offset_of(self, box: LogicalBox) -> int:
        """Where the first element of `box`, a part of this block, is in the shard."""
        steps = zip(self.local.origin, box.origin, self.box.origin, self.strides, strict=True)
        return sum((inside + at - start) * stride for inside, at, start, stride in steps)


def blocks_of(map_: ParamAffineMap, side: str, budget: PlanBudget) -> list[Block]:
    """The blocks of a map, checked.

    Args:
        side: "source" or "target", for messages.
    Raises:
        InvalidMapError: pieces are outside, overlap, do not fill a shard, or name the wrong ranks.
        UnsupportedLayoutError: a piece is permuted or scaled, or shards have another number of dimensions.
    """
    shape = map_.logical_shape
    budget.check("max_ndim", len(shape))
    budget.check("max_pieces_per_map", sum(map(len, map_.pieces_by_rank.values())))
    if any(len(one) != len(shape) for one in map_.shard_shapes.values()):
        raise UnsupportedLayoutError(
            f"{side}: a shard has another number of axes than the parameter of shape {shape}"
        )
    without = sorted(set(map_.pieces_by_rank) - set(map_.shard_shapes))
    if without:
        raise InvalidMapError(f"{side}: ranks {without} have pieces and no shard shape")
    found = []
    for rank in sorted(map_.shard_shapes):
        pieces = map_.pieces_by_rank.get(rank, [])
        own = [
            _block(piece, rank, side, (shape, map_.shard_shapes[rank]))
            for piece in pieces
            if piece.numel or len(piece.shape) != len(shape)
        ]
        budget.check("max_pair_checks", len(own) ** 2)
        _check_shard(own, map_.shard_shapes[rank], f"{side}: rank {rank}")
        found += own
    budget.check("max_pair_checks", len(found) ** 2)
    _check_locations(found, side)
    return found


def _block(piece: AffinePiece, rank: int, side: str, shapes: tuple[Numbers, Numbers]) -> Block:
    """The block of a piece. shapes: of the parameter, and of the shard."""
    where = f"{side}: rank {rank}, {piece}"
    lengths = {len(piece.shape), len(piece.source_strides), len(piece.dest_strides)}
    if lengths != {len(shapes[0])} or min(piece.shape, default=0) < 0 or not piece.locations:
        raise InvalidMapError(
            f"{where}: needs sizes and strides for {len(shapes[0])} axes, and a location"
        )
    if piece.scale != 1.0:
        raise UnsupportedLayoutError(f"{where}: a scale would need other lr and eps as well")
    places = (
        (piece.source_offset, piece.source_strides, shapes[0]),
        (piece.dest_offset, piece.dest_strides, shapes[1]),
    )
    source, dest = (_box(piece, *place, where) for place in places)
    return Block(rank, piece.locations, source, dest, row_major_strides(shapes[1]))


def _box(
    piece: AffinePiece, offset: int, strides: Numbers, shape: Numbers, where: str
) -> LogicalBox:
    packed = row_major_strides(shape)
    for size, stride, wanted in zip(piece.shape, strides, packed, strict=True):
        if size > 1 and stride != wanted:
            raise UnsupportedLayoutError(f"{where}: strides {strides} where {packed} are needed")
    origin, rest = [], offset
    for stride in packed:
        at, rest = divmod(rest, stride) if stride else (0, rest)
        origin.append(at)
    box = LogicalBox(tuple(origin), piece.shape)
    if rest or not LogicalBox((0,) * len(shape), shape).contains(box):
        raise InvalidMapError(f"{where}: reaches outside of {shape}")
    return box


def _check_shard(blocks: Sequence[Block], shape: Numbers, where: str) -> None:
    """The blocks of one rank fill its shard, each element once, and are different elements."""
    for one, two in combinations(blocks, 2):
        if one.local.meets(two.local):
            raise InvalidMapError(f"{where}: two pieces have the same shard addresses")
        if one.box.meets(two.box):
            raise InvalidMapError(f"{where}: two pieces overlap in the parameter")
    held = sum(block.local.volume for block in blocks)
    if held != prod(shape):
        raise InvalidMapError(f"{where}: has pieces of {held} of its {prod(shape)} elements")


def _check_locations(blocks: Sequence[Block], side: str) -> None:
    """The locations of each block are the ranks that have it, and they have it whole."""
    for block in blocks:
        held: dict[int, int] = {}
        for other in blocks:
            part = block.box.intersection(other.box).volume
            if part:
                held[other.rank] = held.get(other.rank, 0) + part
        whole = {rank for rank, part in held.items() if part == block.box.volume}
        if whole != block.locations or set(held) != whole:
            raise InvalidMapError(
                f"{side}: {block.box} has different locations: {sorted(block.locations)} are named, and "
                f"{sorted(held)} hold it or a part"
            )


def is_covered(region: LogicalBox, boxes: Iterable[LogicalBox], budget: PlanBudget) -> bool:
    """The boxes together have every element of `region`."""
    gaps, checks = [] if region.is_empty else [region], 0
    for box in boxes:
        checks += len(gaps)
        budget.check("max_pair_checks", checks)
        gaps = [rest for gap in gaps for rest in gap.without(box)]
    return not gaps


__all__ = [
    "AffineTransferError",
    "Block",
    "InvalidMapError",
    "InvalidReplicaPolicyError",
    "LogicalBox",
    "PlanBudget",
    "UnsupportedLayoutError",
    "blocks_of",
    "is_covered",
]
