"""Attention over all tokens, for models that cut their sequences themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...ops.comm.opening import open_collectives
from ...utils.errors import UsageError
from ..compiled import number_of
from .exchange import HeadExchange
from .shares import key_head_of_each, key_heads, shares


@final
@dataclass(eq=False)
class _Shared:
    """The group of an attention and of its copies.

    number: of the group, by `number_of`.
    cuts: each rank has some of the tokens; else each has all of them.
    """

    group: Collectives | None = None
    dtype: torch.dtype | None = None
    number: int = -1
    cuts: bool = True

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


@final
class DistributedAttention(nn.Module):
    """Calls an attention with all tokens of some heads, where each rank has some tokens of all heads.

    All ranks of the group have equally many tokens, in the order of the ranks. With a group, the model cuts its
    batches, and takes care of positions and of the loss. Without one, `xds.initialize` does, and until then
    `local_attention` is called as it is. Source: Jacobs et al., DeepSpeed Ulysses, 2023, section 3.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        heads_dim: int = 2,
        tokens_dim: int = 1,
    ) -> None:
        """
        Args:
            local_attention: attention(query, key, value, ...) -> output, of tensors with four dimensions.
            group: the ranks that share a sequence; None: those of the engine, by sequence_parallel_size.
            heads_dim, tokens_dim: the dimensions of heads and tokens in these tensors; the last is the width.
        """
        super().__init__()
        if {heads_dim, tokens_dim} not in ({0, 1}, {0, 2}, {1, 2}):
            raise UsageError(
                f"DistributedAttention(heads_dim={heads_dim}, tokens_dim={tokens_dim}): must be two of the "
                "dimensions 0, 1 and 2"
            )
        self.local_attention = local_attention
        self.has_own_group = group is not None
        self._group = group
        self._shared = _Shared()
        batch_dim = 3 - heads_dim - tokens_dim
        self._order = (batch_dim, heads_dim, tokens_dim, 3)
        self._attend: Callable[..., Tensor] = self._exchanged
        if self.has_own_group:  # it is opened in the first call, which a graph cannot
            self._attend = torch.compiler.disable(self._exchanged)  # type: ignore[no-untyped-call]

    def use(self, group: Collectives | None, dtype: torch.dtype | None = None) -> None:
        """Exchange heads in `group`, sent as `dtype`; None: no longer. For the engine."""
        shared = self._shared
        shared.group, shared.dtype = group, dtype
        shared.number = -1 if group is None else number_of(group)

    def set_cuts(self, cuts: bool) -> None:
        """Whether each rank has some of the tokens in forwards from now on, or all. For the engine."""
        self._shared.cuts = cuts

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Own tokens of all heads -> the same. Keys and values may have fewer heads. For all ranks.

        Raises:
            UsageError: there are fewer heads than ranks, or a tensor has not four dimensions.
        """
        return self._attend(query, key, value, *args, **kwargs)

    def _exchanged(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        shared = self._shared
        if self._group is not None and shared.group is None:
            self.use(open_collectives(self._group, query.device))
        group = shared.group
        if group is None or not shared.cuts:
            return self.local_attention(query, key, value, *args, **kwargs)
        for x in (query, key, value):
            if x.dim() != 4:
                raise UsageError(
                    f"DistributedAttention: a tensor of shape {list(x.shape)}; it needs four dimensions: "
                    "batch, tokens, heads and width"
                )
        # a pipeline looks for shapes alone, and a message needs memory; a plan has no process group
        if query.is_meta and group.group is not None:
            return query.new_empty(*query.shape[:3], value.shape[3])
        query, key, value = (x.permute(self._order) for x in (query, key, value))
        heads, kv_heads, world_size = query.shape[1], key.shape[1], group.world_size
        if heads < world_size or heads % kv_heads:
            raise UsageError(
                f"DistributedAttention: {heads} heads of queries and {kv_heads} of keys on {world_size} ranks; "
                "each rank needs a head of queries, and those of keys must divide them; use at most "
                f"{heads} ranks (sequence_parallel_size)"
            )
        tokens = shares(query.shape[2] * world_size, world_size)
        own = shares(heads, world_size)
        of_queries = HeadExchange(group, tokens, own, shared.dtype, shared.number)
        needed = key_heads(heads, kv_heads, world_size)
        of_keys = HeadExchange(group, tokens, needed, shared.dtype, shared.number)
        query, key, value = (
            of_queries.to_heads(query),
            of_keys.to_heads(key),
            of_keys.to_heads(value),
        )
        if kv_heads % world_size:  # groups are cut: one head of keys for each head of queries
            places = key_head_of_each(heads, kv_heads, own[group.rank], key.device)
            key, value = key.index_select(1, places), value.index_select(1, places)
        back = [self._order.index(dim) for dim in range(4)]
        inputs = (x.permute(back) for x in (query, key, value))
        output = self.local_attention(*inputs, *args, **kwargs)
        return of_queries.to_tokens(output.permute(self._order)).permute(back)


__all__ = ["DistributedAttention"]
