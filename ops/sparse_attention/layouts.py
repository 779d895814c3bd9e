"""Which blocks of keys each block of queries sees: layouts of block-sparse attention, by rule.

The rules and their arguments are those of DeepSpeed up to 0.19.6 (`ops/sparse_attention/sparsity_config.py`): a
model that was trained with one of them sees the same tokens here. Random blocks are the same for the same state
of Python's `random`. A layout is an int64 tensor [heads, n, n] for n blocks: 1 at [h, row, col] where, in head
h, the queries of block `row` see the keys of block `col`.

    Fixed               windows; of each window its last blocks for all rows     Child 2019, arXiv 1904.10509
    Variable            windows of given lengths, given global blocks, random ones
    BigBird             a band, the first blocks as rows and columns, random     Zaheer 2020, arXiv 2007.14062
    BSLongformer        a band, given blocks as rows and columns                 Beltagy 2020, arXiv 2004.05150
    LocalSlidingWindow  a band
    Dense               all blocks
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral
from typing import Any, final

import torch
from torch import Tensor

BIDIRECTIONAL, UNIDIRECTIONAL = "bidirectional", "unidirectional"
Ranges = list[tuple[int, int]]


LEAST = {
    **dict.fromkeys(("num_heads", "block", "num_local_blocks", "num_different_global_patterns"), 1),
    **dict.fromkeys(("num_global_blocks", "num_random_blocks", "num_sliding_window_blocks"), 0),
}
LISTS = "local_window_blocks", "global_block_indices", "global_block_end_indices"
REMEMBERED = 256  # layers x lengths


def _ranges(starts: Sequence[int], ends: Sequence[int] | None) -> Ranges:
    """The global blocks as [start, end)."""
    if any(start < 0 for start in starts):
        raise ValueError(f"global_block_indices = {list(starts)}: each must be at least 0")
    if ends is None:
        return [(start, start + 1) for start in starts]
    if len(starts) != len(ends):
        raise ValueError(
            f"global_block_end_indices has {len(ends)} entries and global_block_indices {len(starts)}: give "
            "as many of both"
        )
    for start, end in zip(starts, ends, strict=True):
        if start >= end:
            raise ValueError(
                f"global_block_end_indices: the end {end} must be above its start {start}"
            )
    return list(zip(starts, ends, strict=True))


@dataclass(eq=False)
class SparsityConfig(ABC):
    """The rule of a layout. Derive from it for a rule of your own.

    Args:
        num_heads: heads of the layer.
        block: tokens of a block.
        different_layout_per_head: each head has its own layout; else all have that of the first.
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name, least)
            if not isinstance(value, Integral) or value < least:
                raise ValueError(
                    f"{name} = {value!r}: must be a whole number, and at least {least}"
                )
        self.num_layout_heads = self.num_heads if self.different_layout_per_head else 1

    @abstractmethod
    def make_layout(self, seq_len: int) -> Tensor:
        """The layout [num_heads, n, n] of `seq_len` tokens, a multiple of `block`."""

    def setup_layout(self, seq_len: int) -> Tensor:
        """A layout without blocks. Raises ValueError: `seq_len` is no multiple of `block`."""
        if not isinstance(seq_len, int) or seq_len < 0 or seq_len % self.block:
            raise ValueError(
                f"a sequence of {seq_len} tokens is no multiple of block = {self.block}: pad it"
            )
        n = seq_len // self.block
        return torch.zeros(self.num_heads, n, n, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Give all heads the layout of the first, unless each has its own."""
        if not self.different_layout_per_head:
            layout[1:] = layout[:1]
        return layout


class Rule(SparsityConfig):
    """A rule of this file: it sets the blocks of one head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in LISTS:
            value = getattr(self, name, None)
            if value is not None and not isinstance(value, Sequence):
                raise ValueError(
                    f"{name} = {value!r}: must be a list of whole numbers, such as [4]"
                )
        attention = getattr(self, "attention", BIDIRECTIONAL)
        if attention not in (BIDIRECTIONAL, UNIDIRECTIONAL):
            raise NotImplementedError(
                f'attention = {attention!r}: must be "{BIDIRECTIONAL}" or "{UNIDIRECTIONAL}"'
            )
        if getattr(self, "horizontal_global_attention", False) and attention != BIDIRECTIONAL:
            raise ValueError(
                f"horizontal_global_attention = True: rows that see all blocks need attention = "
                f'"{BIDIRECTIONAL}", and it is "{attention}"; set it to False'
            )
        self.is_causal = attention == UNIDIRECTIONAL

    @final
    def make_layout(self, seq_len: int, rng: Any = random) -> Tensor:
        """The layout [num_heads, n, n] of `seq_len` tokens.

        Args:
            rng: draws random blocks: Python's `random`, or a `random.Random`.
        Raises:
            ValueError: `seq_len` is no multiple of `block`, or there are fewer blocks than the rule takes.
        """
        layout = self.setup_layout(seq_len)
        for head in range(self.num_layout_heads):
            self.fill(layout[head], head, rng)
        return self.check_and_propagate_first_head_layout(layout)

    @abstractmethod
    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        """Set the blocks of one head in `layout` [n, n], which is zero."""


def _random(layout: Tensor, count: int, rng: Any, *, is_causal: bool = False) -> None:
    """A causal row with fewer than `count` blocks before it takes them all (DeepSpeed raises)."""
    n = len(layout)
    if n < count:
        raise ValueError(f"num_random_blocks = {count}: a sequence of {n} blocks has fewer")
    for row in range(n):
        seen = row + 1 if is_causal else n
        layout[row, rng.sample(range(seen), min(count, seen))] = 1


def _windows(layout: Tensor, lengths: Iterable[int], *, is_causal: bool) -> None:
    """Windows of the given lengths along the diagonal; the last length is repeated."""
    n, start, length = len(layout), 0, 0
    given = iter(lengths)
    while True:
        before, length = length, next(given, 0)
        length = length or before
        end = min(start + length, n)
        window = layout.new_ones(max(end - start, 0), max(end - start, 0))
        layout[start:end, start:end] |= window.tril() if is_causal else window
        start += length
        if start >= n:
            return


def _band(layout: Tensor, width: int, *, is_causal: bool = False) -> None:
    n = len(layout)
    if n < width:
        raise ValueError(f"num_sliding_window_blocks = {width}: a sequence of {n} blocks has fewer")
    where = torch.arange(n)
    distance = where.view(-1, 1) - where
    near = distance.abs() <= width // 2
    layout[near & (distance >= 0) if is_causal else near] = 1


def _cross(layout: Tensor, ranges: Ranges, *, has_rows: bool, is_causal: bool = False) -> None:
    """Global blocks: columns for all rows, or for rows from the first block on; and rows."""
    n = len(layout)
    for start, end in ranges:
        if start < n:
            last = min(end, n)
            rows = slice(start if is_causal else 0, None)  # a negative start counts from the end
            layout[rows, start:last] = 1
            if has_rows:
                layout[start:last] = 1


@final
@dataclass(eq=False)
class Dense(Rule):
    """All blocks."""

    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        layout.fill_(1)


@final
@dataclass(eq=False)
class Fixed(Rule):
    """Windows of `num_local_blocks`, and `num_global_blocks` of each window for all rows (after it)."""

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = BIDIRECTIONAL
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        local, size = self.num_local_blocks, self.num_global_blocks
        patterns = self.num_different_global_patterns
        if size < 1 or local % size:
            raise ValueError(
                f"num_local_blocks = {local} must be a multiple of num_global_blocks = {size}"
            )
        if patterns > 1 and not self.different_layout_per_head:
            raise ValueError(
                f"num_different_global_patterns = {patterns} needs different_layout_per_head = True"
            )
        if patterns > local // size:
            raise ValueError(
                f"num_different_global_patterns = {patterns}: a window of {local} blocks has only "
                f"{local // size} places for {size} global blocks"
            )

    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        n, local, size = len(layout), self.num_local_blocks, self.num_global_blocks
        _windows(layout, [local], is_causal=self.is_causal)
        first = local - (1 + head % self.num_different_global_patterns) * size
        end = n - n % local
        starts = list(range(first, end, local))
        if end < n:  # in a short last window they begin at its end at the latest
            starts.append(min(end + first, n - size))
        has_rows = self.horizontal_global_attention
        ranges = [(start, start + size) for start in starts]
        _cross(layout, ranges, has_rows=has_rows, is_causal=self.is_causal)


@final
@dataclass(eq=False)
class Variable(Rule):
    """Windows of given lengths, of which the last is repeated; given global blocks; random blocks.

    As in DeepSpeed, random blocks of a unidirectional layout may be in the future. The attention of xds is
    causal there, and does not see them.
    """

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = BIDIRECTIONAL
    horizontal_global_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.local_window_blocks or min(self.local_window_blocks) < 1:
            raise ValueError(
                f"local_window_blocks = {list(self.local_window_blocks)}: needs lengths, each at least 1"
            )
        self._ranges = _ranges(self.global_block_indices, self.global_block_end_indices)

    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        _random(layout, self.num_random_blocks, rng)
        _windows(layout, self.local_window_blocks, is_causal=self.is_causal)
        has_rows = self.horizontal_global_attention
        _cross(layout, self._ranges, has_rows=has_rows, is_causal=self.is_causal)


@final
@dataclass(eq=False)
class BigBird(Rule):
    """A band of `num_sliding_window_blocks`, the first blocks as rows and columns, random blocks."""

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = BIDIRECTIONAL

    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        if len(layout) < self.num_global_blocks:
            raise ValueError(
                f"num_global_blocks = {self.num_global_blocks}: a sequence of {len(layout)} blocks has fewer"
            )
        _random(layout, self.num_random_blocks, rng, is_causal=self.is_causal)
        _band(layout, self.num_sliding_window_blocks)
        _cross(layout, [(0, self.num_global_blocks)], has_rows=True)
        if self.is_causal:
            layout.tril_()


@final
@dataclass(eq=False)
class BSLongformer(Rule):
    """A band of `num_sliding_window_blocks`, and given blocks as rows and columns."""

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = BIDIRECTIONAL

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ranges = _ranges(self.global_block_indices, self.global_block_end_indices)

    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        _band(layout, self.num_sliding_window_blocks)
        _cross(layout, self._ranges, has_rows=True)
        if self.is_causal:
            layout.tril_()


@final
@dataclass(eq=False)
class LocalSlidingWindow(Rule):
    """A band of `num_sliding_window_blocks`; unidirectional, its half before each row."""

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: str = UNIDIRECTIONAL

    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        _band(layout, self.num_sliding_window_blocks, is_causal=self.is_causal)


CLASSES: dict[str, type[Rule]] = {
    "dense": Dense,
    "fixed": Fixed,
    "variable": Variable,
    "bigbird": BigBird,
    "bslongformer": BSLongformer,
    "local_sliding_window": LocalSlidingWindow,
}


@lru_cache(maxsize=REMEMBERED)
def layout_of(rule: str, heads: int, blocks: int, layer: int) -> Tensor:
    """The layout [1 or heads, n, n] of a sequence of n blocks; not to be changed.

    Args:
        rule: text, which ops of a compiled graph can take: JSON of a mode of the config, the arguments of its
            class, and the seed of random blocks.
        layer: draws its own random blocks, which are the same on every rank and in every run.

    A sequence with fewer blocks than the rule takes sees all of them.
    """
    more = json.loads(rule)
    kind, seed = CLASSES[more.pop("mode")], more.pop("seed")
    made = kind(num_heads=heads if more.get("different_layout_per_head") else 1, **more)
    try:
        layout = made.make_layout(blocks * made.block, random.Random(f"{seed} {layer}"))
    except ValueError:
        return torch.ones(1, blocks, blocks, dtype=torch.uint8)
    return layout.to(torch.uint8)


__all__ = [
    "BSLongformer",
    "BigBird",
    "Dense",
    "Fixed",
    "LocalSlidingWindow",
    "Rule",
    "SparsityConfig",
    "Variable",
    "layout_of",
]
