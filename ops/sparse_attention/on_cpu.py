"""Block-sparse attention on a CPU, forward and backward, by batched products of gathered blocks.

The products are torch's. No score of a block outside of the layout is computed, and scores exist for a few
tiles at a time, so that they stay in a processor's cache. Backward computes them again, as FlashAttention does
(Dao 2022, algorithm 4). Where a tile has many keys, forward merges pieces of them by their running maximum.

Scores are stored as [tiles, keys, query rows]: with rows last the products are faster. They are in units of
log(2), because exp2 is faster than exp. The memory of the loops is taken once for a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from .tiles import tiles_of

CHUNK = 1 << 19  # scores that are computed at a time
MOST_KEYS = 1024  # of a piece of a tile
LOG2_E = 1 / math.log(2)
LEAST = -1e30  # the maximum of a row that sees no key


@final
@dataclass(frozen=True)
class Problem:
    """Matrices of blocks: q [B x H x n, block x D], k and v [B x Hkv x n, block x D], and what is seen."""

    q: Tensor  # times scale / log(2)
    k: Tensor
    v: Tensor
    bias: Tensor | None  # [B x n, block], added to the scores of keys: 0 or -inf
    layout: Tensor  # [1 or H, n, n]
    shape: tuple[int, int, int, int, int]  # B, H, Hkv, n, block
    is_causal: bool
    dropout: float
    seed: int

    @property
    def widths(self) -> tuple[int, int]:
        """D of queries and keys, and of values."""
        block = self.shape[4]
        return self.q.shape[1] // block, self.v.shape[1] // block

    def chunks(self) -> Iterator[Chunk]:
        """Tiles of one size, as many as are computed at a time."""
        batch, heads, key_heads, n, block = self.shape
        tiles = tiles_of(self.layout, block, heads // key_heads, is_causal=self.is_causal)
        times = batch * heads // tiles.query_heads
        number = 0
        for each in tiles.classes:
            queries, keys = each.repeated(times, tiles.query_heads * n, tiles.key_heads * n)
            width = min(keys.shape[1], max(1, MOST_KEYS // block))
            count = max(1, CHUNK // (queries.shape[1] * width * block * block))
            for first in range(0, len(queries), count):
                number += 1
                part = slice(first, first + count)
                yield Chunk(queries[part], keys[part], block, each.has_diagonal, number)

    def bias_of(self, keys: Tensor) -> Tensor:
        """[tiles, keys, 1]: what is added to the scores of these key blocks, [tiles, blocks]."""
        assert self.bias is not None
        n = self.shape[3]
        where = keys // (n * self.shape[2]) * n + keys % n
        return self.bias[where].view(len(keys), -1, 1)


@final
@dataclass(frozen=True)
class Chunk:
    """Tiles of one size: [tiles, query blocks], [tiles, key blocks]."""

    queries: Tensor
    keys: Tensor
    block: int
    has_diagonal: bool
    number: int

    def pieces(self) -> list[tuple[Tensor, bool]]:
        """The key blocks in pieces, each with whether its last block is cut causally."""
        parts = torch.split(self.keys, max(1, MOST_KEYS // self.block), 1)
        return [(part, self.has_diagonal and part is parts[-1]) for part in parts]


@final
class Scratch:
    """Memory by name, which each chunk uses again."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of any values."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = torch.empty(size, dtype=self._dtype)
        return flat[:size].view(shape)

    def gather(self, name: str, blocks: Tensor, where: Tensor, tiles: int, width: int) -> Tensor:
        """[tiles, rows, width]: the blocks at the flat indices `where`."""
        out = self.take(name, len(where), blocks.shape[1])
        torch.index_select(blocks, 0, where, out=out)
        return out.view(tiles, -1, width)


def make_problem(
    tensors: tuple[Tensor, Tensor, Tensor],
    padding: Tensor | None,
    layout: Tensor,
    block: int,
    scale: float,
    **more: Any,
) -> Problem:
    """The problem of q [B, H, L, D], k and v [B, Hkv, L, D]; padding [B, L] is True where a key is seen."""
    batch, heads, length, _ = tensors[0].shape
    n = layout.shape[1]
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    bias = None
    if padding is not None or n * block != length:
        bias = torch.full((batch, n * block), -math.inf, dtype=dtype)
        bias[:, :length] = 0.0
        if padding is not None:
            bias[:, :length].masked_fill_(~padding, -math.inf)
        bias = bias.view(-1, block)
    q, k, v = (as_blocks(x, n, block, dtype) for x in tensors)
    shape = batch, heads, tensors[1].shape[1], n, block
    return Problem(q * (scale * LOG2_E), k, v, bias, layout, shape, **more)


def as_blocks(x: Tensor, n: int, block: int, dtype: torch.dtype) -> Tensor:
    """[B, H, L, D] -> [B x H x n, block x D], with zeros after L."""
    rest = n * block - x.shape[2]
    x = x.to(dtype)
    blocks = x.shape[0] * x.shape[1] * n
    return (F.pad(x, (0, 0, 0, rest)) if rest else x).reshape(blocks, block * x.shape[3])


def forward(of: Problem) -> tuple[Tensor, Tensor]:
    """The output blocks, and the base-2 logarithm of the sum of each row's exponentials, [B x H x n, block].

    The logarithm of a row that sees no key is +inf, and its output 0.
    """
    depth, width = of.widths
    out = of.q.new_zeros(len(of.q), of.shape[4] * width)
    sums = of.q.new_full((len(of.q), of.shape[4]), math.inf)
    scratch, draw = Scratch(of.q.dtype), torch.Generator()
    for chunk in of.chunks():
        where, tiles = chunk.queries.view(-1), len(chunk.queries)
        q = scratch.gather("q", of.q, where, tiles, depth)
        before: tuple[Tensor, Tensor, Tensor] | None = None
        draw.manual_seed(of.seed + chunk.number)
        for keys, has_diagonal in chunk.pieces():
            flat = keys.reshape(-1)
            k = scratch.gather("k", of.k, flat, tiles, depth)
            s = _scores(of, scratch, q, k, keys, has_diagonal)
            top = s.amax(1, keepdim=True)
            if of.bias is not None:
                top.clamp_min_(LEAST)
            s.sub_(top).exp2_()
            total = s.sum(1, keepdim=True)
            if of.dropout:
                s.mul_(_kept(of, scratch, s, draw))
            v = scratch.gather("k", of.v, flat, tiles, width)
            name = "o" if before is None else "more"
            o = scratch.take(name, tiles, q.shape[1], width)
            torch.bmm(s.transpose(1, 2), v, out=o)
            if before is not None:
                both = torch.maximum(top, before[0])
                old, new = (before[0] - both).exp2_(), (top - both).exp2_()
                total = before[1] * old + total * new
                o = before[2].mul_(old.transpose(1, 2)).add_(o.mul_(new.transpose(1, 2)))
                top = both
            before = top, total, o
        assert before is not None
        top, total, o = before
        lse = top + total.log2()
        if of.bias is not None:
            is_empty = total == 0
            total.masked_fill_(is_empty, 1.0)
            lse.masked_fill_(is_empty, math.inf)
        if of.dropout:
            total.mul_(1 - of.dropout)
        o.div_(total.transpose(1, 2))
        out.index_copy_(0, where, o.view(len(where), -1))
        sums.index_copy_(0, where, lse.view(len(where), -1))
    return out, sums


def backward(of: Problem, grad: Tensor, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q (without its scale), k and v, as blocks. grad, out: blocks of the output."""
    depth, width = of.widths
    dq, dk, dv = torch.zeros_like(of.q), torch.zeros_like(of.k), torch.zeros_like(of.v)
    deltas = (grad * out).view(len(out), of.shape[4], width).sum(-1)
    scratch, draw = Scratch(of.q.dtype), torch.Generator()
    for chunk in of.chunks():
        where, tiles = chunk.queries.view(-1), len(chunk.queries)
        q = scratch.gather("q", of.q, where, tiles, depth)
        g = scratch.gather("g", grad, where, tiles, width)
        lse = sums.index_select(0, where).view(tiles, 1, -1)
        delta = deltas.index_select(0, where).view(tiles, 1, -1)
        own_dq = scratch.take("dq", tiles, q.shape[1], depth)
        draw.manual_seed(of.seed + chunk.number)
        for nth, (keys, has_diagonal) in enumerate(chunk.pieces()):
            flat = keys.reshape(-1)
            v = scratch.gather("k", of.v, flat, tiles, width)
            ds = scratch.take("ds", tiles, v.shape[1], q.shape[1])
            torch.bmm(v, g.transpose(1, 2), out=ds)
            k = scratch.gather("k", of.k, flat, tiles, depth)
            p = _scores(of, scratch, q, k, keys, has_diagonal).sub_(lse).exp2_()
            own = scratch.take("dk", tiles, v.shape[1], width)
            if of.dropout:
                kept = _kept(of, scratch, p, draw).div_(1 - of.dropout)
                ds.mul_(kept).sub_(delta).mul_(p)
                torch.bmm(p.mul_(kept), g, out=own)
            else:
                ds.sub_(delta).mul_(p)
                torch.bmm(p, g, out=own)
            dv.index_add_(0, flat, own.view(len(flat), -1))
            own = scratch.take("dk", tiles, v.shape[1], depth)
            torch.bmm(ds, q, out=own)
            dk.index_add_(0, flat, own.view(len(flat), -1))
            if nth == 0:
                torch.bmm(ds.transpose(1, 2), k, out=own_dq)
            else:
                own_dq.baddbmm_(ds.transpose(1, 2), k)
        dq.index_copy_(0, where, own_dq.view(len(where), -1))
    return dq, dk.mul_(1 / LOG2_E), dv


def _scores(
    of: Problem, scratch: Scratch, q: Tensor, k: Tensor, keys: Tensor, has_diagonal: bool
) -> Tensor:
    """[tiles, keys, query rows]: q and k of the tiles, multiplied; -inf where a key is not seen."""
    s = scratch.take("s", len(q), k.shape[1], q.shape[1])
    torch.bmm(k, q.transpose(1, 2), out=s)
    if of.bias is not None:
        s.add_(of.bias_of(keys))
    if has_diagonal:
        block = of.shape[4]
        after = torch.ones(block, block, dtype=torch.bool).tril_(-1).view(block, 1, block)
        s[:, -block:].view(len(q), block, -1, block).masked_fill_(after, -math.inf)
    return s


def _kept(of: Problem, scratch: Scratch, like: Tensor, draw: torch.Generator) -> Tensor:
    """1 where dropout keeps a probability, else 0; the same in backward as in forward."""
    return scratch.take("kept", *like.shape).bernoulli_(1 - of.dropout, generator=draw)


__all__ = ["Problem", "as_blocks", "backward", "forward", "make_problem"]
