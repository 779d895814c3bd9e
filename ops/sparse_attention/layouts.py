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

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

BIDIRECTIONAL, UNIDIRECTIONAL = "bidirectional", "unidirectional"
Ranges = list[tuple[int, int]]


def _check_attention(attention: str) -> None:
    if attention not in (BIDIRECTIONAL, UNIDIRECTIONAL):
        raise NotImplementedError(
            f'attention = {attention!r}: must be "{BIDIRECTIONAL}" or "{UNIDIRECTIONAL}"'
        )


def _check_horizontal(attention: str, is_horizontal: bool) -> None:
    if is_horizontal and attention != BIDIRECTIONAL:
        raise ValueError(
            f"horizontal_global_attention = True: rows that see all blocks need attention = "
            f'"{BIDIRECTIONAL}", and it is "{attention}"; set it to False'
        )


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


class SparsityConfig(ABC):
    """The rule of a layout. Derive from it for a rule of your own."""

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False
    ) -> None:
        """
        Args:
            num_heads: heads of the layer.
            block: tokens of a block.
            different_layout_per_head: each head has its own layout; else all have that of the first.
        """
        if num_heads < 1 or block < 1:
            raise ValueError(f"num_heads = {num_heads}, block = {block}: both must be at least 1")
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    @abstractmethod
    def make_layout(self, seq_len: int) -> Tensor:
        """The layout [num_heads, n, n] of `seq_len` tokens, a multiple of `block`."""

    def setup_layout(self, seq_len: int) -> Tensor:
        """A layout without blocks. Raises ValueError: `seq_len` is no multiple of `block`."""
        if seq_len % self.block:
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


def _random(layout: Tensor, count: int, rng: Any, *, sees_future: bool = True) -> None:
    n = len(layout)
    if n < count:
        raise ValueError(f"num_random_blocks = {count}: a sequence of {n} blocks has fewer")
    for row in range(n):
        layout[row, rng.sample(range(n if sees_future else row + 1), count)] = 1


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
            layout[start if is_causal else 0 :, start:last] = (
                1  # a negative start counts from the end
            )
            if has_rows:
                layout[start:last] = 1


@final
class Dense(Rule):
    """All blocks."""

    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        layout.fill_(1)


@final
class Fixed(Rule):
    """Windows of `num_local_blocks`, and `num_global_blocks` of each window for all rows (after it)."""

    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = BIDIRECTIONAL,
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        local, size, patterns = num_local_blocks, num_global_blocks, num_different_global_patterns
        if local % size:
            raise ValueError(
                f"num_local_blocks = {local} must be a multiple of num_global_blocks = {size}"
            )
        _check_attention(attention)
        _check_horizontal(attention, horizontal_global_attention)
        if patterns > 1 and not different_layout_per_head:
            raise ValueError(
                f"num_different_global_patterns = {patterns} needs different_layout_per_head = True"
            )
        if patterns > local // size:
            raise ValueError(
                f"num_different_global_patterns = {patterns}: a window of {local} blocks has only "
                f"{local // size} places for {size} global blocks"
            )
        self.num_local_blocks, self.num_global_blocks = local, size
        self.attention = attention
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = patterns

    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        n, local, size = len(layout), self.num_local_blocks, self.num_global_blocks
        is_causal = self.attention == UNIDIRECTIONAL
        _windows(layout, [local], is_causal=is_causal)
        first = local - (1 + head % self.num_different_global_patterns) * size
        end = n - n % local
        starts = list(range(first, end, local))
        if end < n:  # in a short last window they begin at its end at the latest
            starts.append(min(end + first, n - size))
        has_rows = self.horizontal_global_attention
        ranges = [(start, start + size) for start in starts]
        _cross(layout, ranges, has_rows=has_rows, is_causal=is_causal)


@final
class Variable(Rule):
    """Windows of given lengths, of which the last is repeated; given global blocks; random blocks.

    As in DeepSpeed, random blocks of a unidirectional layout may be in the future. The attention of xds is
    causal there, and does not see them.
    """

    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = BIDIRECTIONAL,
        horizontal_global_attention: bool = False,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        if not local_window_blocks or min(local_window_blocks) < 1:
            raise ValueError(
                f"local_window_blocks = {list(local_window_blocks)}: needs lengths, each at least 1"
            )
        _check_attention(attention)
        _check_horizontal(attention, horizontal_global_attention)
        self.num_random_blocks = num_random_blocks
        self.local_window_blocks = local_window_blocks
        self.global_block_indices = global_block_indices
        self.global_block_end_indices = global_block_end_indices
        self._ranges = _ranges(global_block_indices, global_block_end_indices)
        self.attention = attention
        self.horizontal_global_attention = horizontal_global_attention

    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        is_causal = self.attention == UNIDIRECTIONAL
        _random(layout, self.num_random_blocks, rng)
        _windows(layout, self.local_window_blocks, is_causal=is_causal)
        has_rows = self.horizontal_global_attention
        _cross(layout, self._ranges, has_rows=has_rows, is_causal=is_causal)


@final
class BigBird(Rule):
    """A band of `num_sliding_window_blocks`, the first blocks as rows and columns, random blocks."""

    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = BIDIRECTIONAL,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _check_attention(attention)
        self.num_random_blocks = num_random_blocks
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = attention

    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        is_causal = self.attention == UNIDIRECTIONAL
        if len(layout) < self.num_global_blocks:
            raise ValueError(
                f"num_global_blocks = {self.num_global_blocks}: a sequence of {len(layout)} blocks has fewer"
            )
        _random_past(layout, self.num_random_blocks, rng, is_causal=is_causal)
        _band(layout, self.num_sliding_window_blocks)
        _cross(layout, [(0, self.num_global_blocks)], has_rows=True)
        if is_causal:
            layout.tril_()


def _random_past(layout: Tensor, count: int, rng: Any, *, is_causal: bool) -> None:
    """As `_random`; a causal row with fewer than `count` blocks before it takes them all (DeepSpeed raises)."""
    if not is_causal or count < 2:
        _random(layout, count, rng, sees_future=not is_causal)
        return
    if len(layout) < count:
        _random(layout, count, rng)
    for row in range(len(layout)):
        layout[row, rng.sample(range(row + 1), min(count, row + 1))] = 1


@final
class BSLongformer(Rule):
    """A band of `num_sliding_window_blocks`, and given blocks as rows and columns."""

    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = BIDIRECTIONAL,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _check_attention(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.global_block_indices = global_block_indices
        self.global_block_end_indices = global_block_end_indices
        self._ranges = _ranges(global_block_indices, global_block_end_indices)
        self.attention = attention

    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        _band(layout, self.num_sliding_window_blocks)
        _cross(layout, self._ranges, has_rows=True)
        if self.attention == UNIDIRECTIONAL:
            layout.tril_()


@final
class LocalSlidingWindow(Rule):
    """A band of `num_sliding_window_blocks`; unidirectional, its half before each row."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: str = UNIDIRECTIONAL,
    ) -> None:
        super().__init__(num_heads, block)
        _check_attention(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.attention = attention

    def fill(self, layout: Tensor, head: int, rng: Any) -> None:
        is_causal = self.attention == UNIDIRECTIONAL
        _band(layout, self.num_sliding_window_blocks, is_causal=is_causal)


__all__ = [
    "BSLongformer",
    "BigBird",
    "Dense",
    "Fixed",
    "LocalSlidingWindow",
    "Rule",
    "SparsityConfig",
    "Variable",
]
