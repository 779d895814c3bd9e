"""Attention of picture encoders whose tokens are cut over sequence ranks."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from .. import comm as dist
from ..missing import placeholder
from .gathered import gather_tokens, lengths_of


@final
class UlyssesSPViTAttention(nn.Module):
    """Every rank computes the attention of all tokens, and keeps its own: each token sees all others.

    The other layers have the tokens of one rank alone, which saves their activations.
    """

    def __init__(self, attn: nn.Module, process_group: Any, has_cls_token: bool = True) -> None:
        """
        Args:
            attn: attn(hidden states, ...) returns hidden states, or a tuple that begins with them.
            has_cls_token: the first token stands for the whole picture, and each rank has it.
        """
        super().__init__()
        self.attn = attn
        self.process_group = process_group
        self.has_cls_token = has_cls_token
        self.world_size = dist.get_world_size(process_group)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """[B, 1 + own patches, H] -> the same; without `has_cls_token` [B, own patches, H]. A collective.

        Ranks may have different numbers of patches.
        """
        num_shared = int(self.has_cls_token)
        shared, own = hidden_states[:, :num_shared], hidden_states[:, num_shared:]
        lengths = lengths_of(own, self.process_group)
        patches = gather_tokens(own, lengths, self.process_group)
        output = self.attn(torch.cat([shared, patches], 1), **kwargs)
        is_tuple = isinstance(output, tuple | list)
        whole, rest = (output[0], tuple(output[1:])) if is_tuple else (output, ())
        start = num_shared + sum(lengths[: dist.get_rank(self.process_group)])
        mine = torch.cat([whole[:, :num_shared], whole[:, start : start + own.shape[1]]], 1)
        return (mine, *rest) if rest else mine


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["UlyssesSPViTAttention"]
