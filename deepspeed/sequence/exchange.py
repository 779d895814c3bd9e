"""Exchanges of heads and tokens as DeepSpeed's scripts call them, with a process group of torch.

    own tokens, all heads  <->  all tokens, own heads

`DistributedAttention` and the engine use xds's own exchange, see tensor/sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.errors import UsageError
from ..comm import comm as collectives
from ..errors import raises_theirs

HEADS_DIM = 2  # of four dimensions: heads, and behind them the width


def shares(total: int, num_ranks: int, whole: int | None = None) -> list[int]:
    """How many of `total` heads each rank has; the first ranks have one more where there is a remainder.

    whole: key and value heads; the query heads of one are never divided.
    """
    units = total if whole is None else whole
    if units < num_ranks or total % units:
        raise UsageError(
            f"{total} heads, in {units} groups, on {num_ranks} sequence ranks: each rank needs a group"
        )
    return [
        total // units * (units // num_ranks + int(rank < units % num_ranks))
        for rank in range(num_ranks)
    ]


def _total_heads(x: Tensor, group: Any) -> int:
    """The heads of all ranks. A collective."""
    number = torch.tensor([x.shape[HEADS_DIM]], device=x.device)
    collectives.all_reduce(number, group=group)
    return int(number)


def _send(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Any) -> list[Tensor]:
    """Send parts[r] to rank r; get a tensor of shapes[r] from it."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = parts[0].new_empty(sum(sizes))
    sent = torch.cat([part.reshape(-1) for part in parts])
    widths = [part.numel() for part in parts]
    collectives.all_to_all_single(received, sent, sizes, widths, group=group)
    pieces = torch.split(received, sizes)
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


@raises_theirs
def single_all_to_all(  # noqa: PLR0913 (DeepSpeed's arguments)
    input: Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: Any,
    async_op: bool = False,
    handle: Any = None,
    type: Any = None,
    num_kv_heads: int | None = None,
) -> Tensor:
    """Divide `input`, four dimensions, along `scatter_idx`, and join what comes along `gather_idx`.

    Args:
        num_kv_heads: as in `shares`, where the heads of `input` are those of queries.
        batch_dim_idx, async_op, handle, type: without effect.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    shape = list(input.shape)
    if scatter_idx == HEADS_DIM:
        heads = shares(shape[HEADS_DIM], num_ranks, num_kv_heads)
        parts = torch.split(input, heads, dim=HEADS_DIM)
        shape[HEADS_DIM] = heads[rank]
        shapes = [shape] * num_ranks
    else:
        if shape[scatter_idx] % num_ranks:
            raise UsageError(
                f"{shape[scatter_idx]} tokens on {num_ranks} sequence ranks: needs a multiple; pad them"
            )
        heads = shares(_total_heads(input, group), num_ranks, num_kv_heads)
        parts = input.chunk(num_ranks, dim=scatter_idx)
        shape[scatter_idx] //= num_ranks
        shapes = [[*shape[:HEADS_DIM], own, *shape[HEADS_DIM + 1 :]] for own in heads]
    return torch.cat(_send(parts, shapes, group), dim=gather_idx)


@final
class _SeqAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 (DeepSpeed's arguments)
        ctx: Any,
        group: Any,
        input: Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int,
        stream: Any = None,
        handle: Any = None,
        type: Any = None,
        is_fwd: bool = True,
        num_kv_heads: int | None = None,
    ) -> Tensor:
        """`single_all_to_all`; its gradient makes the way back.

        stream, handle, type, is_fwd: without effect.
        """
        ctx.group, ctx.num_kv_heads = group, num_kv_heads
        ctx.scatter_idx, ctx.gather_idx, ctx.batch_dim_idx = scatter_idx, gather_idx, batch_dim_idx
        return single_all_to_all(
            input, scatter_idx, gather_idx, batch_dim_idx, group, num_kv_heads=num_kv_heads
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        back = single_all_to_all(
            grads[0].contiguous(),
            ctx.gather_idx,
            ctx.scatter_idx,
            ctx.batch_dim_idx,
            ctx.group,
            num_kv_heads=ctx.num_kv_heads,
        )
        return (None, back, *[None] * 8)


def _dim_zero_all_to_all(group: Any, input: Tensor) -> Tensor:
    """[ranks, ...]: send row r to rank r; row r of the result is what rank r sent. Also in compiled code."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    ones = [1] * input.shape[0]
    found: Tensor = all_to_all_single_autograd(input, ones, ones, group)
    return found


__all__ = ["_SeqAllToAll", "_dim_zero_all_to_all", "shares", "single_all_to_all"]
