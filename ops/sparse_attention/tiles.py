"""Which query blocks are multiplied with which key blocks: a layout as a few classes of equal tiles.

A tile is a set of query blocks that see the same key blocks, of one key head. Tiles with as many query blocks
and key blocks are one class, so that one batched product computes many of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

MOST_ROWS = (
    256  # query rows of a tile: more of them share what is gathered, and larger products are faster
)
REMEMBERED = 64  # layouts


@final
@dataclass(frozen=True)
class TileClass:
    """Tiles of one size. `has_diagonal`: the last key block is that of the query blocks, cut causally."""

    queries: Tensor  # [tiles, query blocks], indices into the query blocks of a span
    keys: Tensor  # [tiles, key blocks]
    has_diagonal: bool

    def repeated(self, times: int, query_span: int, key_span: int) -> tuple[Tensor, Tensor]:
        """The tiles of `times` spans that follow one another: [times x tiles, blocks]."""
        nth = torch.arange(times).view(-1, 1, 1)
        queries = (self.queries + nth * query_span).view(-1, self.queries.shape[1])
        return queries, (self.keys + nth * key_span).view(-1, self.keys.shape[1])


@final
@dataclass(frozen=True)
class Tiles:
    """The tiles of a span: of one key head where all heads have one layout, else of all heads."""

    classes: tuple[TileClass, ...]
    query_heads: int  # of a span
    key_heads: int


def tiles_of(layout: Tensor, block: int, group: int, *, is_causal: bool) -> Tiles:
    """The tiles of a layout.

    Args:
        layout: [1 or query heads, n, n], not zero where a query block sees a key block.
        group: query heads of a key head.
        is_causal: key blocks after the query block are left out, and its own one is cut by elements.
    """
    small = (layout != 0).to(torch.uint8).contiguous()
    if not small.numel():  # a sequence without tokens
        return Tiles((), *((group, 1) if len(layout) == 1 else (len(layout), len(layout) // group)))
    return _tiles(small.numpy().tobytes(), tuple(small.shape), block, group, is_causal)


@lru_cache(maxsize=REMEMBERED)
def _tiles(
    data: bytes, shape: tuple[int, int, int], block: int, group: int, is_causal: bool
) -> Tiles:
    heads, n, _ = shape
    layout = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape).bool()
    if is_causal:
        layout = layout.tril()
    found: dict[tuple[int, int, bool], list[tuple[list[int], list[int]]]] = {}
    query_heads = group if heads == 1 else heads
    for key_head in range(query_heads // group):
        for cols, blocks, row in _sharing(layout, key_head * group, group, is_causal=is_causal):
            most = max(1, MOST_ROWS // block)
            num = -(-len(blocks) // most)
            keys = [key_head * n + col for col in cols]
            if row is not None:
                keys.remove(key_head * n + row)
                keys.append(key_head * n + row)
            for part in range(num):
                own = blocks[part * len(blocks) // num : (part + 1) * len(blocks) // num]
                size = len(own), len(keys), row is not None
                found.setdefault(size, []).append((own, keys))
    classes = tuple(
        TileClass(torch.tensor([q for q, _ in tiles]), torch.tensor([k for _, k in tiles]), size[2])
        for size, tiles in sorted(found.items())
    )
    return Tiles(classes, query_heads, query_heads // group)


def _sharing(
    layout: Tensor, first_head: int, group: int, *, is_causal: bool
) -> list[tuple[list[int], list[int], int | None]]:
    """Key columns, the query blocks that see just these, and the row whose diagonal block is among them."""
    n = layout.shape[1]
    shared: dict[tuple[tuple[int, ...], int | None], list[int]] = {}
    for head in range(first_head, first_head + group):
        rows = layout[head if layout.shape[0] > 1 else 0]
        for row in range(n):
            cols = tuple(rows[row].nonzero().view(-1).tolist())
            diagonal = row if is_causal and row in cols else None
            shared.setdefault((cols, diagonal), []).append(head * n + row)
    return [(list(cols), blocks, row) for (cols, row), blocks in shared.items() if cols]


__all__ = ["TileClass", "Tiles", "tiles_of"]
