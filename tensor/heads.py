"""The heads of an attention that stay whole, and the columns and rows that each rank gets by them.

4 ranks, 8 heads of queries, 2 of keys     rank 0        1        2        3
queries, and rows of the output            heads 0 1    2 3      4 5      6 7
keys and values                            head 0       0        1        1       copies
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from torch import nn

from ..ops.boxes import Range
from ..utils.errors import UsageError
from .shares import copied_ranges, ranges_of, share_of
from .styles import BY_HEADS, CUTS_COLUMNS, CUTS_ROWS, ParallelStyle

COUNTS = (
    "num_heads",
    "heads",
    "n_head",
    "n_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "nheads",
)
SIZES = ("split_size", "embed_dim", "inner_dim", "hidden_size_per_rank")
HEAD_SIZES = ("head_dim", "head_size")
GROUPS = "num_key_value_groups"  # queries of one head of keys, in attention of transformers

Layers = Mapping[str, tuple[nn.Module, ParallelStyle]]


@final
@dataclass(frozen=True)
class Heads:
    """`units` heads of keys and values, each with `queries` heads of queries. size: elements of a head."""

    units: int
    queries: int
    size: int


def heads_of(parent: nn.Module, layers: Layers) -> Heads | None:
    """The heads of the layers under `parent`; None: single columns are cut."""
    inner = [(module, style) for module, style in layers.values() if style.name in BY_HEADS]
    rows = [sum(style.sizes(module)) for module, style in inner if style.name in CUTS_ROWS]
    known = max((style.units for _, style in inner), default=0)
    sizes = [size for module, style in inner for size in style.sizes(module)]
    # rows that another module holds, as the output of BERT's attention, leave the columns alone
    unnamed = Heads(known, 1, min(rows or sizes) // known) if known else None
    size = next((getattr(parent, name) for name in HEAD_SIZES if hasattr(parent, name)), None)
    if not isinstance(size, int) or not size or not sizes or any(s % size for s in sizes):
        return unnamed
    if not any(style.name in CUTS_COLUMNS for _, style in inner):
        return unnamed
    units = min(sizes) // size
    if known not in (0, units):
        return unnamed
    return Heads(units, max(rows, default=units * size) // size // units, size)


def ranges_of_layer(
    name: str, module: nn.Module, style: ParallelStyle, heads: Heads | None, num_ranks: int
) -> list[tuple[Range, ...]]:
    """The columns or rows of the layer `name` that each rank has.

    Raises:
        UsageError: there are too few of them.
    """
    sizes, ranks = style.sizes(module), range(num_ranks)
    if heads is None or style.name not in BY_HEADS or any(size % heads.units for size in sizes):
        even_ranges(name, min(sizes), num_ranks)
        return [_of_parts(sizes, num_ranks, rank) for rank in ranks]
    if heads.units >= num_ranks:
        return [ranges_of(sizes, heads.units, num_ranks, rank) for rank in ranks]
    try:
        return [copied_ranges(sizes, heads.units, heads.size, num_ranks, rank) for rank in ranks]
    except ValueError as error:
        raise UsageError(
            f"tensor_parallel.tp_size = {num_ranks}: {name}: {error}; set it to {heads.units * heads.queries} "
            "at most"
        ) from None


def even_ranges(name: str, units: int, num_ranks: int) -> list[tuple[Range, ...]]:
    """`units` columns or rows of the layer `name`, cut as evenly as possible.

    Raises:
        UsageError: there are fewer than ranks.
    """
    if units < num_ranks:
        raise UsageError(
            f"tensor_parallel.tp_size = {num_ranks}: {name} has {units} columns or rows to cut, fewer than "
            "ranks; take it out of the plan"
        )
    return [(share_of(units, num_ranks, rank),) for rank in range(num_ranks)]


def _of_parts(sizes: Sequence[int], num_ranks: int, rank: int) -> tuple[Range, ...]:
    found, at = [], 0
    for size in sizes:
        start, stop = share_of(size, num_ranks, rank)
        found.append((at + start, at + stop))
        at += size
    return tuple(found)


def check_copies(
    parent: str, heads: Heads, layers: Layers, ranges: Mapping[str, Sequence[tuple[Range, ...]]]
) -> None:
    """
    Raises:
        UsageError: ranks would have copies of rows, whose outputs are summed, or of one part of a packed layer.
    """
    for name, (_, style) in layers.items():
        by_rank = ranges[name]
        copied = [
            mine == theirs
            for first, second in pairwise(by_rank)
            for mine, theirs in zip(first, second, strict=True)
        ]
        if any(copied) and (style.name in CUTS_ROWS or len(by_rank[0]) > 1):
            packed = ", packed with those of queries" if len(by_rank[0]) > 1 else ""
            raise UsageError(
                f"tensor_parallel.tp_size = {len(by_rank)}: {parent} has {heads.units} heads of keys and "
                f"values{packed}, fewer than ranks; set it to {heads.units} at most"
            )


def set_counts(parent: nn.Module, heads: Heads, num_ranks: int, rank: int) -> None:
    """Numbers of heads and of features in the parent become those of `rank`."""
    units, has_copies = heads.units, heads.units < num_ranks
    if has_copies:
        units *= heads.queries
        ((start, stop),) = copied_ranges([units], heads.units, 1, num_ranks, rank)
    else:
        start, stop = share_of(units, num_ranks, rank)
    for name in (*COUNTS, *SIZES):
        value = parent.__dict__.get(name)
        if not isinstance(value, int):
            continue
        if has_copies and value == heads.units:
            setattr(parent, name, 1)
        elif value % units == 0:
            setattr(parent, name, value // units * (stop - start))
    if has_copies and GROUPS in parent.__dict__:
        setattr(parent, GROUPS, stop - start)


__all__ = ["Heads", "check_copies", "even_ranges", "heads_of", "ranges_of_layer", "set_counts"]
