"""Attention of some queries to one block of keys, and how the results of several blocks are merged.

    forward    attend(...) -> output and log-sum-exp of the scores, merged over blocks in fp32
    backward   gradients(...): the weights are computed again from the scores and their log-sum-exp

A query that sees no key has the output 0 and the log-sum-exp -inf. Products are computed in the dtype of the
inputs, all else in fp32 or wider. Source: Liu et al., Ring Attention with Blockwise Transformers, 2023,
section 3; Dao et al., FlashAttention, 2022, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from .shares import Range

NONE = float("-inf")  # the score of a key that is not seen
Tensors = tuple[Tensor, Tensor, Tensor]  # queries, keys and values
Result = tuple[Tensor, Tensor]  # [B, H, n, D] output, [B, H, n, 1] log-sum-exp


@final
@dataclass(frozen=True, eq=False)
class Visibility:
    """Which keys a query sees: none after it, and not all before it. Never a mask of the whole sequence.

    window: how many tokens a query sees, itself included; None: all before it.
    kept: [B or 1, N] bool, False where a key is padding; None: there is no padding.
    documents: [B or 1, N], equal for tokens that see each other; None: all do.
    """

    window: int | None = None
    kept: Tensor | None = None
    documents: Tensor | None = None

    def keys(self, queries: Range, keys: Range) -> Range:
        """Those of `keys` that are not too early or too late for all of `queries`. May be empty.

        >>> Visibility(window=2).keys((4, 6), (0, 8))
        (3, 6)
        """
        first = keys[0] if self.window is None else max(keys[0], queries[0] - self.window + 1)
        return first, max(first, min(keys[1], queries[1]))

    def mask(self, queries: Range, keys: Range, device: torch.device) -> Tensor | None:
        """[B or 1, 1, n, m] bool, True where a query sees a key; None: each query sees each key."""
        mask: Tensor | None = None
        rows = torch.arange(*queries, device=device)[:, None]
        columns = torch.arange(*keys, device=device)
        if keys[1] - 1 > queries[0]:
            mask = columns <= rows
        if self.window is not None and keys[0] <= queries[1] - 1 - self.window:
            near = columns > rows - self.window
            mask = near if mask is None else mask & near
        visible = None if mask is None else mask[None, None]
        if self.kept is not None:
            kept = self.kept[:, None, None, keys[0] : keys[1]]
            visible = kept if visible is None else visible & kept
        if self.documents is not None:
            of_queries, of_keys = (self.documents[:, a:b] for a, b in (queries, keys))
            same = (of_queries[:, :, None] == of_keys[:, None])[:, None]
            visible = same if visible is None else visible & same
        return visible


def attend(tensors: Tensors, mask: Tensor | None, scale: float) -> Result:
    """Attention to one block of keys.

    tensors: queries [B, H, n, D], keys and values [B, K, m, D], with K heads of keys for H of queries.
    mask: [B or 1, 1, n, m] bool, True where a query sees a key; None: everywhere.
    """
    query, key, value = tensors
    scores = _scores(query, key, mask, scale)
    highest = _finite(scores.amax(-1, keepdim=True))
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    output = torch.matmul(_grouped(weights, key).to(value.dtype), value).to(total.dtype)
    # the highest score of a query that sees a key adds 1 to its total
    return output.view(*query.shape[:3], -1) / total.clamp_min(1), highest + total.log()


def merge(first: Result, second: Result) -> Result:
    """The attention to two blocks of keys together, from the attention to each.

    >>> zero = torch.zeros(1, 1, 1, 1)
    >>> merge((zero, zero), (zero + 2, zero))[0].item()
    1.0
    """
    total = torch.logaddexp(first[1], second[1])
    base = _finite(total)
    parts = (output * (log_sum - base).exp() for output, log_sum in (first, second))
    return sum(parts, start=torch.zeros_like(base)), total


def gradients(
    tensors: Tensors,
    grad: Tensor,
    log_sum: Tensor,
    products: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensors:
    """What one block of keys adds to the gradients of queries, and the gradients of its keys and values.

    tensors: queries, keys and values, as for `attend`.
    grad: [B, H, n, D], of the merged output. log_sum: [B, H, n, 1], merged.
    products: [B, H, n, 1], the sum of output times gradient over the width.
    Returns gradients in fp32 or wider.
    """
    query, key, value = tensors
    weights = _scores(query, key, mask, scale).sub_(_finite(log_sum)).exp_()
    grads = _grouped(grad.to(value.dtype), key)
    of_value = torch.matmul(_grouped(weights, key).to(value.dtype).transpose(-2, -1), grads)
    of_weights = torch.matmul(grads, value.transpose(-2, -1)).view_as(weights).to(weights.dtype)
    of_scores = of_weights.sub_(products).mul_(weights).mul_(scale)
    of_scores = _grouped(of_scores, key).to(key.dtype)
    of_key = torch.matmul(of_scores.transpose(-2, -1), _grouped(query, key))
    of_query = torch.matmul(of_scores, key).view_as(query)
    result = (of_query.to(weights.dtype), of_key.to(weights.dtype), of_value.to(weights.dtype))
    return result


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of outputs, sums and gradients."""
    return torch.promote_types(dtype, torch.float32)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[B, H, n, m]."""
    scores = (
        torch.matmul(_grouped(query, key), key.transpose(-2, -1)).to(wide(query.dtype)).mul_(scale)
    )
    scores = scores.view(*query.shape[:3], key.shape[2])
    return scores if mask is None else scores.masked_fill_(~mask, NONE)


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """[B, H, n, W] -> [B, K, H / K * n, W]: the queries of one head of keys together."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[3])


def _finite(x: Tensor) -> Tensor:
    return torch.where(x == NONE, torch.zeros_like(x), x)


__all__ = ["Visibility", "attend", "gradients", "merge", "wide"]
