"""DistributedAttention gives what attention of all tokens gives, with its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from warm_ranks import warm

import xds
from xds.tensor import DistributedAttention

RANKS, BATCH, TOKENS, WIDTH = 2, 2, 8, 4


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """[B, N, H, D]"""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, scale=scale
    ).transpose(1, 2)


def attend_tokens_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[N, B, H, D]"""
    return attend(*(x.transpose(0, 1) for x in (query, key, value))).transpose(0, 1)


def inputs(heads: int, kv_heads: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(BATCH, TOKENS, count, WIDTH) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def on_rank(heads: int, kv_heads: int, kind: str) -> list[Tensor]:
    rank, group = dist.get_rank(), dist.group.WORLD
    own = [x.chunk(RANKS, 1)[rank].clone().requires_grad_() for x in inputs(heads, kv_heads)]
    if kind == "ours":
        out = DistributedAttention(attend, group)(*own, scale=0.3)
    else:
        from xds.deepspeed.sequence.layer import DistributedAttention as Theirs

        given = [x.transpose(0, 1) for x in own]
        out = Theirs(attend_tokens_first, group)(*given, 1).transpose(0, 1)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in own)]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kind"), [(6, 3, "ours"), (5, 5, "ours"), (4, 2, "deepspeed's")]
)
def test_outputs_and_gradients_are_those_of_all_tokens(
    heads: int, kv_heads: int, kind: str
) -> None:
    whole = [x.requires_grad_() for x in inputs(heads, kv_heads)]
    out = attend(*whole, scale=0.3 if kind == "ours" else None)
    out.square().sum().backward()
    ranks = warm(RANKS).run(on_rank, heads, kv_heads, kind)
    wanted = [out, *(x.grad for x in whole)]
    for parts, expected in zip(zip(*ranks, strict=True), wanted, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), expected)


def refused() -> list[str]:
    attention = DistributedAttention(attend, dist.group.WORLD)
    found = []
    for shape in ((2, 4, 1, 4), (2, 4, 4)):
        with pytest.raises(xds.UsageError) as caught:
            attention(*[torch.zeros(shape)] * 3)
        found.append(str(caught.value))
    return found


def test_too_few_heads_are_one_sentence() -> None:
    for found in warm(RANKS).run(refused):
        assert "1 heads of queries and 1 of keys on 2 ranks" in found[0]
        assert "needs four dimensions" in found[1]
    with pytest.raises(xds.UsageError, match="must be two of the dimensions"):
        DistributedAttention(attend, None, heads_dim=3)  # type: ignore[arg-type]
