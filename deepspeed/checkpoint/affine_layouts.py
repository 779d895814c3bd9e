"""Maps of common layouts: a parameter that is copied, or split along one dimension, or split part by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...utils.errors import UsageError
from ..errors import raises_theirs
from .affine_maps import AffinePiece, ParamAffineMap, row_major_strides

Part = tuple[
    int, int, tuple[int, ...]
]  # start and length along the dimension, and the ranks that have it


def _map_of(
    shape: Iterable[int], dim: int, parts_by_rank: Mapping[int, Sequence[Part]]
) -> ParamAffineMap:
    """The map of shards that consist of `parts_by_rank` one after another along `dim`."""
    shape = tuple(shape)
    shard_shapes: dict[int, tuple[int, ...]] = {}
    pieces: dict[int, list[AffinePiece]] = {}
    strides = row_major_strides(shape)
    for rank, parts in parts_by_rank.items():
        held = sum(length for _, length, _ in parts)
        shard_shapes[rank] = (*shape[:dim], held, *shape[dim:][1:])
        inside = row_major_strides(shard_shapes[rank])
        pieces[rank], at = [], 0
        for start, length, ranks in parts:
            block = (*shape[:dim], length, *shape[dim:][1:])
            source, dest = start * strides[dim], at * inside[dim]
            pieces[rank].append(AffinePiece(block, source, strides, dest, inside, ranks))
            at += length
    return ParamAffineMap(shape, shard_shapes, pieces)


def replicated_map(shape: Iterable[int], tp_degree: int, scale: float = 1.0) -> ParamAffineMap:
    """Every rank has the whole parameter, times `scale`."""
    shape = tuple(shape)
    strides, ranks = row_major_strides(shape), range(tp_degree)
    piece = AffinePiece(shape, 0, strides, 0, strides, ranks, scale)
    return ParamAffineMap(shape, dict.fromkeys(ranks, shape), {rank: [piece] for rank in ranks})


def contiguous_split_map(
    shape: Iterable[int], per_rank_sizes: Sequence[int], partition_dim: int
) -> ParamAffineMap:
    """Rank r has the r-th part along `partition_dim`, which is `per_rank_sizes[r]` long."""
    parts = {
        rank: [(sum(per_rank_sizes[:rank]), size, (rank,))]
        for rank, size in enumerate(per_rank_sizes)
    }
    return _map_of(shape, partition_dim, parts)


def sub_param_map(
    shape: Iterable[int],
    sub_dim_sizes: Sequence[int],
    shard_widths: Sequence[Sequence[int]],
    partition_dim: int,
) -> ParamAffineMap:
    """The parameter is several ones along `partition_dim`, such as Q, K and V; each of them is split.

    Args:
        sub_dim_sizes: the length of each.
        shard_widths: for each of them the lengths that the ranks have.
    """
    segments = [(size, False) for size in sub_dim_sizes]
    return _split_or_copied(shape, segments, partition_dim, len(shard_widths[0]), shard_widths)


@raises_theirs
def segmented_map(
    shape: Iterable[int],
    segments: Sequence[tuple[int, bool]],
    partition_dim: int,
    tp_degree: int,
    split_widths: Sequence[Sequence[int]],
) -> ParamAffineMap:
    """The parameter is several segments along `partition_dim`; each is split, or whole on all ranks.

    Args:
        segments: (length, whole on all ranks) of each.
        split_widths: for each segment that is split the lengths that the ranks have.
    Raises:
        UsageError: (a ValueError) the lengths of a segment are not as many as ranks, or another sum.
    """
    split = [size for size, is_copied in segments if not is_copied]
    for size, widths in zip(split, split_widths, strict=True):
        if len(widths) != tp_degree or sum(widths) != size:
            raise UsageError(
                f"split_widths {list(widths)} do not account for a segment of {size} over {tp_degree} ranks"
            )
    return _split_or_copied(shape, segments, partition_dim, tp_degree, split_widths)


def _split_or_copied(
    shape: Iterable[int],
    segments: Sequence[tuple[int, bool]],
    dim: int,
    num_ranks: int,
    split_widths: Sequence[Sequence[int]],
) -> ParamAffineMap:
    parts: dict[int, list[Part]] = {rank: [] for rank in range(num_ranks)}
    start, widths_of_next = 0, iter(split_widths)
    for size, is_copied in segments:
        widths = None if is_copied else next(widths_of_next)
        for rank in parts:
            if widths is None:
                parts[rank].append((start, size, tuple(parts)))
            else:
                parts[rank].append((start + sum(widths[:rank]), widths[rank], (rank,)))
        start += size
    return _map_of(shape, dim, parts)


def block_gather_map(
    shape: Iterable[int],
    block_ids_by_rank: Mapping[int, Sequence[int]],
    block_size: int,
    partition_dim: int,
) -> ParamAffineMap:
    """Each rank has chosen blocks of `block_size` along `partition_dim`; neighbours are one piece."""
    parts: dict[int, list[Part]] = {}
    for rank, block_ids in block_ids_by_rank.items():
        runs: list[list[int]] = []
        for number in block_ids:
            if runs and number == runs[-1][0] + runs[-1][1]:
                runs[-1][1] += 1
            else:
                runs.append([number, 1])
        parts[rank] = [(first * block_size, count * block_size, (rank,)) for first, count in runs]
    return _map_of(shape, partition_dim, parts)


__all__ = [
    "block_gather_map",
    "contiguous_split_map",
    "replicated_map",
    "segmented_map",
    "sub_param_map",
]
