"""The exchange of heads for tokens by the ranks of a sequence group, without autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops.comm.collectives import Collectives
from .shares import Range

KIND = "sequence heads"


def send_heads(
    group: Collectives,
    x: Tensor,
    tokens: Sequence[Range],
    heads: Sequence[Range],
    dtype: torch.dtype,
) -> Tensor:
    """[B, H, own tokens, D] -> [B, own heads, all tokens, D], sent as `dtype`."""
    first, end = heads[group.rank]
    sent = x.to(dtype)
    parts = [sent[:, a:b].contiguous() for a, b in heads]
    outs = [sent.new_empty(x.shape[0], end - first, b - a, x.shape[3]) for a, b in tokens]
    group.all_to_all(outs, parts, what="heads of attention", kind=KIND).wait()
    return torch.cat(outs, 2).to(x.dtype)


def send_tokens(
    group: Collectives,
    x: Tensor,
    tokens: Sequence[Range],
    heads: Sequence[Range],
    dtype: torch.dtype,
) -> Tensor:
    """[B, own heads, all tokens, D] -> [B, H, own tokens, D], sent as `dtype`.

    What several ranks send of one head is added in rank order.
    """
    first, end = tokens[group.rank]
    sent = x.to(dtype)
    parts = [sent[:, :, a:b].contiguous() for a, b in tokens]
    outs = [sent.new_empty(x.shape[0], b - a, end - first, x.shape[3]) for a, b in heads]
    group.all_to_all(outs, parts, what="tokens of attention", kind=KIND).wait()
    whole = x.new_zeros(x.shape[0], max(b for _, b in heads), end - first, x.shape[3])
    for (a, b), out in zip(heads, outs, strict=True):
        whole[:, a:b] += out
    return whole


__all__ = ["KIND", "send_heads", "send_tokens"]
