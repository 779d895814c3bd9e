"""`deepspeed.checkpoint.affine_transfer`: copies that turn the shards of one `affine` map into another's.

    source map, target map  ->  boxes that they share  ->  one copy for each  ->  neighbours joined

Nothing is copied here, and the whole parameter is never made. affine_boxes.py has the checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any, final

from ..missing import placeholder
from .affine_boxes import (
    AffineTransferError,
    Block,
    InvalidMapError,
    InvalidReplicaPolicyError,
    LogicalBox,
    Numbers,
    PlanBudget,
    UnsupportedLayoutError,
    blocks_of,
    is_covered,
)
from .affine_maps import ParamAffineMap as ParamAffineMap


@final
@dataclass(frozen=True)
class PlanStatistics:
    """Numbers of a plan: different source boxes, target pieces, pairs of them, copies, bytes as JSON."""

    source_pieces: int
    target_pieces: int
    pair_checks: int
    segments_before_merge: int
    segments: int
    plan_bytes: int


@final
@dataclass(frozen=True)
class ReplicaCandidate:
    """A rank that has the block, and where its shard has it."""

    source_rank: int
    source_offset: int
    source_strides: Numbers


@final
@dataclass(frozen=True)
class ReplicaSelectionRequest:
    """A block that several ranks have, and where it goes; for `replica_selector`."""

    target_rank: int
    logical_origin: Numbers
    shape: Numbers
    target_offset: int
    target_strides: Numbers
    candidates: tuple[ReplicaCandidate, ...]


Selector = Callable[[ReplicaSelectionRequest], int]


@final
@dataclass(frozen=True)
class TransferSegment:
    """One copy of a block of `shape`, as `torch.as_strided` addresses it in both shards."""

    source_rank: int
    source_offset: int
    source_strides: Numbers
    target_rank: int
    target_offset: int
    target_strides: Numbers
    shape: Numbers

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists alone."""
        return {
            "shape": list(self.shape),
            "source": [self.source_rank, self.source_offset, list(self.source_strides)],
            "target": [self.target_rank, self.target_offset, list(self.target_strides)],
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> TransferSegment:
        """The segment that `to_dict` described."""
        (source_rank, source_offset, source_strides) = entry["source"]
        (target_rank, target_offset, target_strides) = entry["target"]
        return cls(
            source_rank,
            source_offset,
            tuple(source_strides),
            target_rank,
            target_offset,
            tuple(target_strides),
            tuple(entry["shape"]),
        )

    def order(self) -> tuple[Any, ...]:
        """By target, then by source."""
        target = (self.target_rank, self.target_offset)
        return (*target, self.source_rank, self.source_offset, self.shape, self.source_strides)

    def joined(self, other: TransferSegment) -> TransferSegment | None:
        """This copy and `other`, which continues it along one dimension in both shards; None: it does not."""
        for axis, size in enumerate(self.shape):
            after = replace(
                self,
                source_offset=self.source_offset + size * self.source_strides[axis],
                target_offset=self.target_offset + size * self.target_strides[axis],
                shape=_with(self.shape, axis, other.shape[axis]),
            )
            if after == other:
                return replace(self, shape=_with(self.shape, axis, size + other.shape[axis]))
        return None


@final
@dataclass(frozen=True)
class TransferPlan:
    """Copies that write every element of every target shard once."""

    segments: tuple[TransferSegment, ...]
    logical_shape: Numbers
    moved_elements: int
    statistics: PlanStatistics

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists alone."""
        return {
            "logical_shape": list(self.logical_shape),
            "segments": [segment.to_dict() for segment in self.segments],
        }


def plan_transfer(
    target_map: ParamAffineMap,
    source_map: ParamAffineMap,
    limits: PlanBudget | None = None,
    *,
    replica_selector: Selector | None = None,
) -> TransferPlan:
    """Copies from the shards of `source_map` into those of `target_map`, in a fixed order.

    Args:
        replica_selector: returns the rank to read a block from that several ranks have; None: the lowest.
    Raises:
        InvalidMapError: a map contradicts itself, or they are of different parameters.
        UnsupportedLayoutError: a piece is no box, or has a scale.
        AffineTransferError: the base of these errors; a limit is exceeded.
    """
    budget = limits or PlanBudget()
    shape = target_map.logical_shape
    if source_map.logical_shape != shape:
        raise InvalidMapError(
            f"the source describes a parameter of shape {source_map.logical_shape}, the target {shape}"
        )
    sources = _by_box(blocks_of(source_map, "source", budget), budget)
    targets = blocks_of(target_map, "target", budget)
    targets.sort(key=lambda block: (block.rank, block.box))
    _check_cover(shape, list(sources), [block.box for block in targets], budget)
    pairs = len(sources) * len(targets)
    budget.check("max_pair_checks", pairs)
    copies = [
        _copy(target, shared, holders, replica_selector)
        for target in targets
        for box, holders in sources.items()
        for shared in (target.box.intersection(box),)
        if not shared.is_empty
    ]
    segments = _joined(copies, budget)
    budget.check("max_segments", len(segments))
    plan = TransferPlan(
        segments,
        shape,
        sum(segment.numel for segment in segments),
        PlanStatistics(len(sources), len(targets), pairs, len(copies), len(segments), 0),
    )
    size = len(json.dumps(plan.to_dict(), separators=(",", ":"), sort_keys=True))
    budget.check("max_plan_bytes", size)
    return replace(plan, statistics=replace(plan.statistics, plan_bytes=size))


def _by_box(blocks: Iterable[Block], budget: PlanBudget) -> dict[LogicalBox, list[Block]]:
    """The blocks with equal boxes, by rank. Raises UnsupportedLayoutError: boxes overlap otherwise."""
    found: dict[LogicalBox, list[Block]] = {}
    for block in sorted(blocks, key=lambda block: (block.box, block.rank)):
        found.setdefault(block.box, []).append(block)
    boxes = list(found)
    budget.check("max_pair_checks", len(boxes) ** 2)
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if box.meets(other):
                raise UnsupportedLayoutError(
                    f"source: {box} and {other} overlap: ranks cut what they have in common differently"
                )
    return found


def _check_cover(
    shape: Numbers, sources: Sequence[LogicalBox], targets: Sequence[LogicalBox], budget: PlanBudget
) -> None:
    """Both sides have every element. The source boxes have no element in common."""
    whole = LogicalBox((0,) * len(shape), shape)
    there = sum(box.volume for box in sources)
    if there != whole.volume:
        raise InvalidMapError(f"the source has {there} of its {whole.volume} elements")
    if not is_covered(whole, targets, budget):
        raise InvalidMapError(f"the target does not have every element of {shape}")


def _copy(
    target: Block, shared: LogicalBox, holders: Sequence[Block], select: Selector | None
) -> TransferSegment:
    source, offset = holders[0], target.offset_of(shared)
    if select is not None and len(holders) > 1:
        candidates = tuple(
            ReplicaCandidate(one.rank, one.offset_of(shared), one.strides) for one in holders
        )
        place = (offset, target.strides)
        rank = select(
            ReplicaSelectionRequest(target.rank, shared.origin, shared.extent, *place, candidates)
        )
        chosen = [one for one in holders if type(rank) is int and one.rank == rank]
        if not chosen:
            ranks = [one.rank for one in holders]
            raise InvalidReplicaPolicyError(
                f"replica_selector returned {rank!r} for target rank {target.rank}: must be one of {ranks}"
            )
        source = chosen[0]
    start = source.offset_of(shared)
    there = (target.rank, offset, target.strides)
    return TransferSegment(source.rank, start, source.strides, *there, shape=shared.extent)


def _joined(copies: Sequence[TransferSegment], budget: PlanBudget) -> tuple[TransferSegment, ...]:
    """The copies, with neighbours joined until none is left, or the limit of passes is reached."""

    def pair(one: TransferSegment) -> tuple[Any, ...]:
        return one.source_rank, one.target_rank, one.source_strides, one.target_strides

    found, checks = [], 0
    for _, group in groupby(sorted(copies, key=lambda one: (pair(one), one.order())), key=pair):
        left = list(group)
        for _ in range(budget.max_merge_passes):
            kept: list[TransferSegment] = []
            for one in left:
                checks += len(kept)
                budget.check("max_merge_checks", checks)
                _add(kept, one)
            is_done, left = len(kept) == len(left), kept
            if is_done:
                break
        found += left
    return tuple(sorted(found, key=TransferSegment.order))


def _add(kept: list[TransferSegment], one: TransferSegment) -> None:
    """Append `one`, or join it with a neighbour in the list."""
    for number, other in enumerate(kept):
        both = other.joined(one) or one.joined(other)
        if both is not None:
            kept[number] = both
            return
    kept.append(one)


def _with(shape: Numbers, axis: int, size: int) -> Numbers:
    return (*shape[:axis], size, *shape[axis + 1 :])


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = [
    "AffineTransferError",
    "InvalidMapError",
    "InvalidReplicaPolicyError",
    "LogicalBox",
    "PlanBudget",
    "PlanStatistics",
    "ReplicaCandidate",
    "ReplicaSelectionRequest",
    "TransferPlan",
    "TransferSegment",
    "UnsupportedLayoutError",
    "plan_transfer",
]
