"""Attention over the blocks of a layout, in the way of the device.

CPU                      on_cpu.py: batched products of gathered blocks; an op, also for dropout
GPU                      flex.py: FlexAttention with a block mask
GPU with dropout         dense.py: masked dense attention, which the others are compared with
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...utils.errors import UsageError
from . import on_cpu
from .dense import element_mask, masked_attention
from .rules import layout_of

Way = Literal["auto", "blocks", "flex", "dense"]


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
    length = q.shape[2]
    needed = -(-length // block)
    if k.shape[2] != length or v.shape[2] != length:
        raise UsageError(
            f"sparse attention: {length} queries and {k.shape[2]} keys: a layout is of one sequence; use "
            "torch's scaled_dot_product_attention for cross-attention"
        )
    if layout.dim() != 3 or layout.shape[0] not in (1, q.shape[1]) or layout.shape[1] < needed:
        raise UsageError(
            f"sparse attention: layout {list(layout.shape)} for {q.shape[1]} heads and {length} tokens: needs "
            f"[1 or {q.shape[1]}, n, n] with at least {needed} blocks of {block}"
        )
    if q.shape[1] % k.shape[1]:
        raise UsageError(
            f"sparse attention: {q.shape[1]} query heads are no multiple of {k.shape[1]} key heads"
        )
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


def chosen(way: Way, q: Tensor, dropout: float) -> Way:
    """The way for this device."""
    if way != "auto":
        return way
    if q.is_cuda:
        return "dense" if dropout else "flex"
    return "blocks"


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
    """The CPU's way. One node of a compiled graph: it finds the layout of a `rule` itself."""
    seed = torch.randint(0, 1 << 62, ()) if dropout else None
    block = max(
        1, min(block, q.shape[2])
    )  # a block that is longer than the sequence needs no padding
    out: Tensor
    out, _ = _attend(q, k, v, padding, layout, seed, rule, layer, block, is_causal, scale, dropout)
    return out


@torch.library.custom_op("xds::block_sparse_attention", mutates_args=())
def _attend(  # noqa: PLR0913
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
) -> tuple[Tensor, Tensor]:
    """The output [B, H, L, D], and the logarithms that backward needs, [B x H x n, block]."""
    of = _problem(q, k, v, padding, layout, seed, rule, layer, block, is_causal, scale, dropout)
    out, sums = on_cpu.forward(of)
    whole = out.view(*q.shape[:2], -1, v.shape[3])[:, :, : q.shape[2]]
    return whole.to(q.dtype).contiguous(), sums


@torch.library.custom_op("xds::block_sparse_attention_backward", mutates_args=())
def _attend_backward(  # noqa: PLR0913
    grad: Tensor,
    out: Tensor,
    sums: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    of = _problem(q, k, v, padding, layout, seed, rule, layer, block, is_causal, scale, dropout)
    grad, out = (on_cpu.as_blocks(x, of.shape[3], block, of.q.dtype) for x in (grad, out))
    found = on_cpu.backward(of, grad, out, sums)
    found[0].mul_(scale)
    dq, dk, dv = (
        own.view(*x.shape[:2], -1, x.shape[3])[:, :, : x.shape[2]].to(x.dtype).contiguous()
        for own, x in zip(found, (q, k, v), strict=True)
    )
    return dq, dk, dv


def _problem(  # noqa: PLR0913
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
) -> on_cpu.Problem:
    if layout is None:
        layout = layout_of(rule, q.shape[1], -(-q.shape[2] // block), layer)
    drawn = 0 if seed is None else int(seed)
    more: Any = {"is_causal": is_causal, "dropout": dropout, "seed": drawn}
    return on_cpu.make_problem((q, k, v), padding, layout, block, scale, **more)


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

__all__ = ["Way", "blocks_attention", "chosen", "sparse_attention"]
