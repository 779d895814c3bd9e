"""Attention over all tokens, for models that cut their sequences themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...ops.comm.opening import open_collectives
from ...utils.errors import UsageError
from .exchange import HeadExchange
from .shares import key_head_of_each, key_heads, shares


@final
class DistributedAttention(nn.Module):
    """Calls an attention with all tokens of some heads, where each rank has some tokens of all heads.

    All ranks of the group have equally many tokens, in the order of the ranks. The model cuts its batches, and
    takes care of positions and of the loss. Source: Jacobs et al., DeepSpeed Ulysses, 2023, section 3.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        group: dist.ProcessGroup,
        *,
        heads_dim: int = 2,
        tokens_dim: int = 1,
    ) -> None:
        """
        Args:
            local_attention: attention(query, key, value, ...) -> output, of tensors with four dimensions.
            group: the ranks that share a sequence.
            heads_dim, tokens_dim: the dimensions of heads and tokens in these tensors; the last is the width.
        """
        super().__init__()
        if {heads_dim, tokens_dim} not in ({0, 1}, {0, 2}, {1, 2}):
            raise UsageError(
                f"DistributedAttention(heads_dim={heads_dim}, tokens_dim={tokens_dim}): must be two of the "
                "dimensions 0, 1 and 2"
            )
        self.local_attention = local_attention
        self._group = group
        batch_dim = 3 - heads_dim - tokens_dim
        self._order = (batch_dim, heads_dim, tokens_dim, 3)
        self._collectives: Collectives | None = None  # opened for the device of the first input

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Own tokens of all heads -> the same. Keys and values may have fewer heads. For all ranks.

        Raises:
            UsageError: there are fewer heads than ranks, or a tensor has not four dimensions.
        """
        if self._collectives is None:
            self._collectives = open_collectives(self._group, query.device)
        group = self._collectives
        for x in (query, key, value):
            if x.dim() != 4:
                raise UsageError(
                    f"DistributedAttention: a tensor of shape {list(x.shape)}; it needs four dimensions: "
                    "batch, tokens, heads and width"
                )
        query, key, value = (x.permute(self._order) for x in (query, key, value))
        heads, kv_heads, world_size = query.shape[1], key.shape[1], group.world_size
        if heads < world_size or heads % kv_heads:
            raise UsageError(
                f"DistributedAttention: {heads} heads of queries and {kv_heads} of keys on {world_size} ranks; "
                "each rank needs a head of queries, and those of keys must divide them"
            )
        tokens = shares(query.shape[2] * world_size, world_size)
        own = shares(heads, world_size)
        of_queries = HeadExchange(group, tokens, own)
        of_keys = HeadExchange(group, tokens, key_heads(heads, kv_heads, world_size))
        query, key, value = (
            of_queries.to_heads(query),
            of_keys.to_heads(key),
            of_keys.to_heads(value),
        )
        if kv_heads % world_size:  # groups are cut: one head of keys for each head of queries
            index = key_head_of_each(heads, kv_heads, own[group.rank])
            places = torch.tensor(index, device=key.device)
            key, value = key.index_select(1, places), value.index_select(1, places)
        back = [self._order.index(dim) for dim in range(4)]
        inputs = (x.permute(back) for x in (query, key, value))
        output = self.local_attention(*inputs, *args, **kwargs)
        return of_queries.to_tokens(output.permute(self._order)).permute(back)


__all__ = ["DistributedAttention"]
