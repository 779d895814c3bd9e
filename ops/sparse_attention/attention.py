"""Attention over the blocks of a layout, in the way of the device.

CPU                      on_cpu.py: batched products of gathered blocks; an op, also for dropout
GPU                      flex.py: FlexAttention with a block mask
GPU with dropout         masked dense attention, which the others are compared with, and which biases take
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ...utils.errors import UsageError
from .on_cpu import blocks_attention

Way = Literal["auto", "blocks", "flex", "dense"]
WAYS = get_args(Way)


def sparse_attention(  # noqa: PLR0913 (what attention has)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    *,
    block: int,
    padding: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    way: Way = "auto",
) -> Tensor:
    """Softmax attention: block i of the queries sees block j of the keys where layout[h, i, j] is not 0.

    Args:
        q: [B, H, L, D]. k, v: [B, Hkv, L, D], where H is a multiple of Hkv.
        layout: [1 or H, n, n] with n blocks of at least L tokens; what is beyond L is cut off.
        block: tokens of a block. L need not be a multiple of it.
        padding: [B, L], True (or not 0) for keys that are seen; None: all.
        is_causal: no query sees a key after it, whatever the layout says.
        scale: of the scores; None: D to the power of -1/2.
        dropout: of the probabilities.
        way: "blocks" (CPU), "flex" or "dense"; "auto" chooses by device.

    Returns:
        [B, H, L, D] in q's dtype; 0 for a query that sees no key. fp16 and bf16 are computed in fp32 on a CPU.

    Raises:
        UsageError: shapes do not fit.

    The layout has no gradient, and backward on a CPU computes the scores again. Second derivatives need
    way="dense".
    """
    needed = _check(q, k, v, layout, block, padding)
    length = q.shape[2]
    layout = layout[:, :needed, :needed]
    seen = None if padding is None else padding != 0
    scale = q.shape[3] ** -0.5 if scale is None else scale
    way = chosen(way, q, dropout)
    if way == "dense":
        mask = element_mask(layout.to(q.device), block, (0, length), length, is_causal=is_causal)
        whole = mask if seen is None else mask & seen[:, None, None]
        return masked_attention(q, k, v, whole, scale=scale, dropout=dropout)
    if way == "flex":
        from .flex import flex

        options: Any = {"padding": seen, "is_causal": is_causal, "scale": scale}
        return flex(q, k, v, layout.cpu(), block, **options)
    return blocks_attention(q, k, v, seen, layout, "", 0, block, is_causal, scale, dropout)


def _check(
    q: Tensor, k: Tensor, v: Tensor, layout: Tensor, block: int, padding: Tensor | None
) -> int:
    """Refuse what does not fit. Returns the blocks of a sequence."""
    shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
    if not isinstance(block, int) or isinstance(block, bool) or block < 1:
        raise UsageError(f"sparse attention: block = {block!r}: must be a whole number, at least 1")
    if {q.dim(), k.dim(), v.dim()} != {4} or not (q.shape[1] and k.shape[1] and q.shape[3]):
        raise UsageError(
            f"sparse attention: q, k and v of {shapes}: need [B, H, L, D] each, with at least one head"
        )
    length = q.shape[2]
    if k.shape[2] != length or v.shape[2] != length:
        raise UsageError(
            f"sparse attention: {length} queries and {k.shape[2]} keys: a layout is of one sequence; use "
            "torch's scaled_dot_product_attention for cross-attention"
        )
    if q.shape[1] % k.shape[1]:
        raise UsageError(
            f"sparse attention: {q.shape[1]} query heads are no multiple of {k.shape[1]} key heads"
        )
    if k.shape[:2] != v.shape[:2] or len(q) != len(k) or q.shape[3] != k.shape[3]:
        raise UsageError(
            f"sparse attention: q, k and v of {shapes}: need one batch size, k and v as many heads, and q "
            "and k one width"
        )
    if not all(x.is_floating_point() for x in (q, k, v)):
        raise UsageError(
            f"sparse attention: q, k and v of {q.dtype}, {k.dtype}, {v.dtype}: need real floating dtypes"
        )
    needed = -(-length // block)
    heads = q.shape[1]
    if (
        not isinstance(layout, Tensor)
        or layout.dim() != 3
        or layout.shape[0] not in (1, heads)
        or layout.shape[1] != layout.shape[2]
        or layout.shape[1] < needed
    ):
        shown = list(layout.shape) if isinstance(layout, Tensor) else type(layout).__name__
        raise UsageError(
            f"sparse attention: layout {shown} for {heads} heads and {length} tokens: needs a tensor "
            f"[1 or {heads}, n, n] with at least {needed} blocks of {block}"
        )
    if padding is not None and padding.shape != (len(q), length):
        raise UsageError(
            f"sparse attention: padding {list(padding.shape)}: needs [{len(q)}, {length}]"
        )
    return needed


def chosen(way: Way, q: Tensor, dropout: float) -> Way:
    """The way for this device.

    Raises:
        UsageError: no such way, or no such share of dropout.
    """
    if way not in WAYS:
        raise UsageError(f"sparse attention: way = {way!r}: must be one of {WAYS}")
    if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise UsageError(f"sparse attention: dropout = {dropout!r}: must be at least 0 and below 1")
    if way != "auto":
        return way
    if q.device.type != "cpu":
        return "dense" if dropout else "flex"
    return "blocks"


def element_mask(
    layout: Tensor, block: int, rows: tuple[int, int], keys: int, *, is_causal: bool
) -> Tensor:
    """[1 or heads, query rows, keys] of bool: which keys the queries at the positions `rows` see.

    Args:
        layout: [1 or heads, n, n], of at least `keys` tokens.
        rows: the first position of the queries, and the one after the last.
    """
    at = torch.arange(*rows, device=layout.device)
    to = torch.arange(keys, device=layout.device)
    seen = layout[:, at // block][:, :, to // block] != 0
    return seen & (at.view(-1, 1) >= to) if is_causal else seen


def masked_attention(  # noqa: PLR0913 (what attention has)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of all scores, with those outside of `mask` left out; 0 for a query that sees no key.

    Args:
        q: [B, H, Lq, D]; k and v: [B, Hkv, Lk, D].
        mask: bool that broadcasts to [B, H, Lq, Lk].
        bias: added to the scores; broadcasts to their shape.
    """
    if bias is not None:
        added = bias.to(q.dtype).masked_fill(~mask, float("-inf"))
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask if bias is None else added,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.masked_fill(~mask.any(-1, keepdim=True), 0.0)


__all__ = ["WAYS", "Way", "chosen", "element_mask", "masked_attention", "sparse_attention"]
