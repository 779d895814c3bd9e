"""Masked dense attention of a layout: the reference, and the way for biases, and for dropout on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


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


__all__ = ["element_mask", "masked_attention"]
