"""Block-sparse attention on a CPU, forward and backward, by batched products of gathered blocks.

The products are torch's. No score of a block outside of the layout is computed, and scores exist for a few
tiles at a time, so that they stay in a processor's cache. Backward computes them again, as FlashAttention does
(Dao 2022, algorithm 4). Where a tile has many keys, forward merges pieces of them by their running maximum.

A tile is a set of query blocks that see the same key blocks, of one key head. Tiles with as many query blocks
and key blocks are one class, so that one batched product computes many of them.

Scores are stored as [tiles, keys, query rows]: with rows last the products are faster. They are in units of
log(2), because exp2 is faster than exp. The memory of the loops is taken once for a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional as F

from ...utils.errors import UsageError
from .layouts import layout_of

CHUNK = 1 << 19  # scores that are computed at a time
MOST_KEYS = 1024  # of a piece of a tile
LOG2_E = 1 / math.log(2)
LEAST = -1e30  # the maximum of a row that sees no key
MOST_ROWS = 256  # query rows of a tile: more share what is gathered, and larger products are faster
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
    scale: float
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


def make_problem(  # noqa: PLR0913 (arguments of an op)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    layout: Tensor | None,
    seed: Tensor | None,
    rule: str,
    layer: int,
    block: int,
    is_causal: bool,
    scale: float,
    dropout: float,
) -> Problem:
    """The problem of q [B, H, L, D], k and v [B, Hkv, L, D]; padding [B, L] is True where a key is seen."""
    batch, heads, length, _ = q.shape
    if layout is None:
        layout = layout_of(rule, heads, -(-length // block), layer)
    n = layout.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    bias = None
    if padding is not None or n * block != length:
        bias = torch.full((batch, n * block), -math.inf, dtype=dtype)
        bias[:, :length] = 0.0
        if padding is not None:
            bias[:, :length].masked_fill_(~padding, -math.inf)
        bias = bias.view(-1, block)
    shape = batch, heads, k.shape[1], n, block
    own_q, own_k, own_v = (as_blocks(x, n, block, dtype) for x in (q, k, v))
    drawn = 0 if seed is None else int(seed)
    scaled = own_q * (scale * LOG2_E)
    return Problem(scaled, own_k, own_v, bias, layout, shape, is_causal, scale, dropout, drawn)


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
    """The gradients of q, k and v, as blocks. grad, out: blocks of the output."""
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
    return dq.mul_(of.scale), dk.mul_(1 / LOG2_E), dv


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


def blocks_attention(  # noqa: PLR0913 (arguments of an op)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    layout: Tensor | None,
    rule: str,
    layer: int,
    block: int,
    is_causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """The CPU's way. One node of a compiled graph: it finds the layout of a `rule` itself.

    Raises:
        UsageError: a derivative in forward mode is asked for, which torch would take for zero.
    """
    if not torch.compiler.is_compiling() and any(
        unpack_dual(one).tangent is not None  # type: ignore[no-untyped-call]
        for one in (q, k, v)
    ):
        raise UsageError(
            "sparse attention on a CPU has no derivative in forward mode (torch.func.jvp, dual numbers): use "
            "backward, or dense attention"
        )
    seed = torch.randint(0, 1 << 62, ()) if dropout else None
    # a block that is longer than the sequence needs no padding
    block = max(1, min(block, q.shape[2]))
    out: Tensor
    out, _ = _attend(q, k, v, padding, layout, seed, rule, layer, block, is_causal, scale, dropout)
    return out


# the arguments of `make_problem`: `blocks_attention` is one node of a graph, and its backward another
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? padding, Tensor? layout, Tensor? seed, str rule, SymInt layer, "
    "SymInt block, bool is_causal, float scale, float dropout"
)


@torch.library.custom_op(
    "xds::block_sparse_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The output [B, H, L, D], and the logarithms that backward needs, [B x H x n, block]."""
    of = make_problem(q, k, v, *rest)
    out, sums = forward(of)
    whole = out.view(*q.shape[:2], of.shape[3] * of.shape[4], v.shape[3])[:, :, : q.shape[2]]
    return whole.to(q.dtype).contiguous(), sums


@torch.library.custom_op(
    "xds::block_sparse_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor sums, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _attend_backward(
    grad: Tensor, out: Tensor, sums: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    of = make_problem(q, k, v, *rest)
    block = of.shape[4]
    grad, out = (as_blocks(x, of.shape[3], block, of.q.dtype) for x in (grad, out))
    found = backward(of, grad, out, sums)
    dq, dk, dv = (
        own.view(*x.shape[:2], of.shape[3] * block, x.shape[3])[:, :, : x.shape[2]]
        .to(x.dtype)
        .contiguous()
        for own, x in zip(found, (q, k, v), strict=True)
    )
    return dq, dk, dv


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    block = rest[5]
    blocks = q.shape[0] * q.shape[1] * ((q.shape[2] + block - 1) // block)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, q.new_empty(blocks, block, dtype=dtype)


@_attend_backward.register_fake
def _(grad: Tensor, out: Tensor, sums: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in rest[:3])
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.rest = inputs[6:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 12
    return (*_attend_backward(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 9)


_attend.register_autograd(_backward, setup_context=_keep)


__all__ = ["blocks_attention", "tiles_of"]
