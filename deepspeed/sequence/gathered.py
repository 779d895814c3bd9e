"""Gathers parts of sequences, with gradients. The collectives are those of `deepspeed.comm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import comm as dist


def lengths_of(part: Tensor, group: Any) -> list[int]:
    """How many tokens each rank has in dimension 1. A collective."""
    own = torch.tensor([part.shape[1]], dtype=torch.long, device=part.device)
    found = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [int(length) for length in found]


def gather_tokens(part: Tensor, lengths: Sequence[int], group: Any) -> Tensor:
    """[B, own tokens, H] -> [B, all tokens, H]. A collective, also in backward.

    Its gradient is that of the sum of the losses of all ranks. DeepSpeed's has none.
    """
    found: Tensor = _Gather.apply(part, tuple(lengths), group)  # type: ignore[no-untyped-call]
    return found


class _Gather(torch.autograd.Function):
    """Parts of different lengths are padded for the message."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, lengths: tuple[int, ...], group: Any) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        sent = nn.functional.pad(part, (0, 0, 0, max(lengths) - part.shape[1])).contiguous()
        found = [torch.zeros_like(sent) for _ in lengths]
        dist.all_gather(found, sent, group=group)
        return torch.cat([x[:, :n] for x, n in zip(found, lengths, strict=True)], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        whole = grads[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        rank = dist.get_rank(ctx.group)
        return whole.split(ctx.lengths, 1)[rank].contiguous(), None, None


__all__ = ["gather_tokens", "lengths_of"]
