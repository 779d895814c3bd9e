"""`deepspeed.sequence.layer`: `DistributedAttention` with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...tensor.sequence import distributed
from ..missing import placeholder
from .exchange import _dim_zero_all_to_all, _SeqAllToAll, single_all_to_all


@final
class DistributedAttention(nn.Module):
    """`xds.tensor.DistributedAttention`, where each call says which dimension is that of the batch."""

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: dist.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        """
        Args:
            scatter_idx: the dimension of the heads.
            gather_idx, sp_stream: no effect; `batch_dim_idx` of a call tells the dimension of the tokens.
        """
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self._by_batch_dim = nn.ModuleDict()
        # a compiled block has a graph before this module and one after it
        self._attend = torch.compiler.disable(self._exchanged)  # type: ignore[no-untyped-call]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Own tokens of all heads -> the same; batch_dim_idx 0: [B, N, H, D], 1: [N, B, H, D]."""
        found: Tensor = self._attend(query, key, value, batch_dim_idx, *args, **kwargs)
        return found

    def _exchanged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        name = str(batch_dim_idx)
        if name not in self._by_batch_dim:
            self._by_batch_dim[name] = distributed.DistributedAttention(
                self.local_attn,
                self.spg,
                heads_dim=self.scatter_idx,
                tokens_dim=3 - self.scatter_idx - batch_dim_idx,
            )
        found: Tensor = self._by_batch_dim[name](query, key, value, *args, **kwargs)
        return found


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["DistributedAttention", "_SeqAllToAll", "_dim_zero_all_to_all", "single_all_to_all"]
