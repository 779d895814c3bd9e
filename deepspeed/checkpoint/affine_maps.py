"""The classes of `deepspeed.checkpoint.affine`: pieces of a parameter, and the map of all its shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, final

import torch
from torch import Tensor

from ...utils.errors import UsageError
from ..errors import in_their_form, raises_theirs

AFFINE_MAP_FORMAT_VERSION = 1  # of `ParamAffineMap.to_dict`

# a parameter times s has gradients divided by s, which Adam's states follow
SCALE_POWER_BY_STATE = {"fp32": 1, "exp_avg": -1, "exp_avg_sq": -2}


@final
class AffinePiece:
    """A block of elements of the whole parameter, and where a shard has it. Immutable.

    Args:
        shape: of the block.
        source_offset, source_strides: the block in the whole parameter.
        dest_offset, dest_strides: the same block in the shard.
        locations: every rank that has the block.
        scale: the shard has the block times this number, which is not 0.
    """

    __slots__ = (
        "dest_offset",
        "dest_strides",
        "locations",
        "scale",
        "shape",
        "source_offset",
        "source_strides",
    )

    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        shape: Iterable[int],
        source_offset: int,
        source_strides: Iterable[int],
        dest_offset: int,
        dest_strides: Iterable[int],
        locations: Iterable[int],
        scale: float = 1.0,
    ) -> None:
        self.shape = tuple(map(int, shape))
        self.source_offset, self.source_strides = (
            int(source_offset),
            tuple(map(int, source_strides)),
        )
        self.dest_offset, self.dest_strides = int(dest_offset), tuple(map(int, dest_strides))
        self.locations = frozenset(map(int, locations))
        self.scale = float(scale)
        if not self.scale:
            with in_their_form():
                raise UsageError("AffinePiece: scale = 0 is not invertible; give another number")

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def source_view(self, full_param: Tensor) -> Tensor:
        """The block as a view of the whole parameter, whose storage begins with it."""
        return torch.as_strided(full_param, self.shape, self.source_strides, self.source_offset)

    def dest_view(self, shard: Tensor) -> Tensor:
        """The block as a view of the shard, whose storage begins with it."""
        return torch.as_strided(shard, self.shape, self.dest_strides, self.dest_offset)

    def source_offsets(self) -> Iterator[int]:
        """Where each element is in the flattened parameter; as many numbers as elements."""
        for place in product(*map(range, self.shape)):
            steps = zip(place, self.source_strides, strict=True)
            yield self.source_offset + sum(at * stride for at, stride in steps)

    def dest_range(self) -> tuple[int, int] | None:
        """[start, stop) in the shard where the block has no gaps there; None: it has gaps, or is empty."""
        if len(self.dest_strides) != len(self.shape) or not self.numel:
            return None
        packed = row_major_strides(self.shape)
        for size, stride, wanted in zip(self.shape, self.dest_strides, packed, strict=True):
            if size > 1 and stride != wanted:
                return None
        return self.dest_offset, self.dest_offset + self.numel

    def _fields(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __eq__(self, other: object) -> bool:
        return (
            self._fields() == other._fields() if isinstance(other, AffinePiece) else NotImplemented
        )

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        source = f"source=({self.source_offset}, {self.source_strides})"
        dest = f"dest=({self.dest_offset}, {self.dest_strides})"
        held = f"locations={sorted(self.locations)}, scale={self.scale}"
        return f"AffinePiece(shape={self.shape}, {source}, {dest}, {held})"

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists alone; a scale of 1 is left out."""
        found: dict[str, Any] = {
            "shape": list(self.shape),
            "source": [self.source_offset, list(self.source_strides)],
            "dest": [self.dest_offset, list(self.dest_strides)],
            "locations": sorted(self.locations),
        }
        return found if self.scale == 1.0 else {**found, "scale": self.scale}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> AffinePiece:
        """The piece that `to_dict` described."""
        source, source_strides = entry["source"]
        dest, dest_strides = entry["dest"]
        ranks, scale = entry["locations"], entry.get("scale", 1.0)
        return cls(entry["shape"], source, source_strides, dest, dest_strides, ranks, scale)


@final
class ParamAffineMap:
    """How one parameter is spread over ranks.

    Args:
        logical_shape: of the whole parameter.
        shard_shapes: the shape of each rank's shard.
        pieces_by_rank: the pieces of which it consists.
    """

    def __init__(
        self,
        logical_shape: Iterable[int],
        shard_shapes: Mapping[int, Iterable[int]],
        pieces_by_rank: Mapping[int, Iterable[AffinePiece]],
    ) -> None:
        self.logical_shape = tuple(map(int, logical_shape))
        self.shard_shapes = {int(r): tuple(map(int, shape)) for r, shape in shard_shapes.items()}
        self.pieces_by_rank = {int(rank): list(pieces) for rank, pieces in pieces_by_rank.items()}

    @property
    def numel(self) -> int:
        return prod(self.logical_shape)

    def _pieces(self) -> Iterator[tuple[int, AffinePiece]]:
        for rank, pieces in self.pieces_by_rank.items():
            for piece in pieces:
                yield rank, piece

    # -- checks -------------------------------------------------------------------------------------------

    def holders(self) -> dict[int, set[int]]:
        """For each element of the flattened parameter the ranks that have it. Time: its elements."""
        found: dict[int, set[int]] = {}
        for rank, piece in self._pieces():
            for offset in piece.source_offsets():
                found.setdefault(offset, set()).add(rank)
        return found

    def uncovered_offsets(self) -> list[int]:
        """The elements that no rank has; the parameter can be rebuilt where there are none."""
        return sorted(set(range(self.numel)).difference(self.holders()))

    @raises_theirs
    def validate(self) -> None:
        """Check that pieces fill each shard. Raises UsageError (a ValueError): they do not, or overlap."""
        for rank, pieces in self.pieces_by_rank.items():
            size, held = prod(self.shard_shapes[rank]), sum(piece.numel for piece in pieces)
            if size != held:
                raise UsageError(
                    f"rank {rank} has a shard of {size} elements, and pieces of {held}"
                )
            last = 0
            for start, stop in sorted(filter(None, (piece.dest_range() for piece in pieces))):
                if start < 0 or stop > size:
                    raise UsageError(
                        f"rank {rank} has a piece at [{start}, {stop}), outside the shard of {size} elements"
                    )
                if start < last:
                    raise UsageError(f"rank {rank} has two pieces at element {start} of its shard")
                last = stop

    @raises_theirs
    def validate_coverage(self) -> None:
        """Also check every element. Time: the elements of the parameter.

        Raises:
            UsageError: (a ValueError and an AssertionError) no rank has an element, or `locations` of a piece
                are not the ranks that have each of its elements.
        """
        self.validate()
        missing = self.uncovered_offsets()
        if missing:
            raise UsageError(
                f"{len(missing)} elements of the parameter of shape {self.logical_shape} are uncovered, the "
                f"first one is {missing[0]}"
            )
        holders = self.holders()
        for rank, piece in self._pieces():
            for offset in piece.source_offsets():
                if holders[offset] != piece.locations:
                    raise UsageError(
                        f"{piece} of rank {rank}: element {offset} is held by {sorted(holders[offset])}; a "
                        "piece ends where the ranks that have it change"
                    )

    # -- tensors ------------------------------------------------------------------------------------------

    @raises_theirs
    def rebuild(self, shards: Mapping[int, Tensor], scale_power: int = 1) -> Tensor:
        """The whole parameter from the shards of all ranks.

        Args:
            scale_power: a shard has the parameter times scale to this power, see SCALE_POWER_BY_STATE.
        Raises:
            UsageError: the map is wrong, a shard has another size, or ranks have different values of a block.
            NotImplementedError: a state of an optimizer (scale_power other than 1) has a scale.
        """
        self.validate()
        self._refuse_scaled_states(scale_power)
        for rank, shard in shards.items():
            size = prod(self.shard_shapes[rank])
            if shard.numel() != size:
                raise UsageError(
                    f"the shard of rank {rank} has {shard.numel()} elements, and the map describes {size}"
                )
        full = next(iter(shards.values())).new_empty(self.numel)
        flat = {
            rank: _own_storage(shards[rank]) for rank, held in self.pieces_by_rank.items() if held
        }
        seen: set[int] = set()
        for rank, piece in self._pieces():
            values = scaled(piece.dest_view(flat[rank]), piece.scale, scale_power)
            place = piece.source_view(full)
            if len(piece.locations) > 1 and piece.source_offset in seen:
                if not torch.equal(place, values):
                    raise UsageError(
                        f"ranks {sorted(piece.locations)} hold different data of the block at element "
                        f"{piece.source_offset}"
                    )
                continue
            place.copy_(values)
            seen.add(piece.source_offset)
        return full.view(self.logical_shape)

    def extract(self, full_param: Tensor, rank: int, scale_power: int = 1) -> Tensor:
        """The shard of `rank`; `rebuild` undoes it. Raises NotImplementedError as `rebuild`."""
        self._refuse_scaled_states(scale_power)
        flat = _own_storage(full_param)
        shard = flat.new_empty(prod(self.shard_shapes[rank]))
        for piece in self.pieces_by_rank[rank]:
            factor = piece.scale**scale_power
            values = piece.source_view(flat)
            piece.dest_view(shard).copy_(values if factor == 1.0 else values * factor)
        return shard.view(self.shard_shapes[rank])

    def _refuse_scaled_states(self, scale_power: int) -> None:
        """lr and eps of the optimizer would have to follow the scale, and they are not in the map."""
        if scale_power != 1 and any(piece.scale != 1.0 for _, piece in self._pieces()):
            raise NotImplementedError(
                "an optimizer state with a scale: lr and eps would stay in the source coordinate, so the "
                "training would continue otherwise; convert the parameter alone"
            )

    # -- files --------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists alone, for a file."""
        ranks = {
            rank: {
                "shard_shape": list(self.shard_shapes[rank]),
                "pieces": [piece.to_dict() for piece in pieces],
            }
            for rank, pieces in sorted(self.pieces_by_rank.items())
        }
        return {"logical_shape": list(self.logical_shape), "ranks": ranks}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> ParamAffineMap:
        """The map that `to_dict` described."""
        ranks = {int(rank): one for rank, one in entry["ranks"].items()}
        shapes = {rank: one["shard_shape"] for rank, one in ranks.items()}
        pieces = {rank: map(AffinePiece.from_dict, one["pieces"]) for rank, one in ranks.items()}
        return cls(entry["logical_shape"], shapes, pieces)

    def __repr__(self) -> str:
        counts = {rank: len(pieces) for rank, pieces in sorted(self.pieces_by_rank.items())}
        return f"ParamAffineMap(logical_shape={self.logical_shape}, pieces_per_rank={counts})"


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of this shape without gaps."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def scaled(tensor: Tensor, scale: float, scale_power: int) -> Tensor:
    """The values of the whole parameter, from those of a shard."""
    factor = scale**scale_power
    return tensor if factor == 1.0 else tensor / factor


def _own_storage(tensor: Tensor) -> Tensor:
    """Flattened, and the first element of its storage: offsets of pieces are those of a storage."""
    flat = tensor.reshape(-1)
    return flat.clone() if flat.storage_offset() else flat
