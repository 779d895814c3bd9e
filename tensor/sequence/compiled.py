"""The messages of sequence ranks as custom ops of torch, which torch.compile keeps in a graph without a break.

    xds::sequence_to_heads(x, group, tokens, heads, dtype)     as HeadExchange.to_heads
    xds::sequence_to_tokens(x, group, tokens, heads, dtype)    as HeadExchange.to_tokens

`tokens` and `heads` have two numbers for each rank: the first of its range, and the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compiled import group_of
from .messages import send_heads, send_tokens
from .shares import Range


def flat(ranges: Sequence[Range]) -> list[int]:
    """The numbers of the ranges in order, as the ops take them."""
    return [number for ends in ranges for number in ends]


def _ranges(numbers: Sequence[int]) -> tuple[Range, ...]:
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


@torch.library.custom_op("xds::sequence_to_heads", mutates_args=())
def to_heads(
    x: Tensor, group: int, tokens: Sequence[int], heads: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """[B, H, own tokens, D] -> [B, own heads, all tokens, D]."""
    return send_heads(group_of(group), x, _ranges(tokens), _ranges(heads), dtype)


@torch.library.custom_op("xds::sequence_to_tokens", mutates_args=())
def to_tokens(
    x: Tensor, group: int, tokens: Sequence[int], heads: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """[B, own heads, all tokens, D] -> [B, H, own tokens, D]."""
    return send_tokens(group_of(group), x, _ranges(tokens), _ranges(heads), dtype)


def _as_heads(
    x: Tensor, group: int, tokens: Sequence[int], heads: Sequence[int], dtype: torch.dtype
) -> Tensor:
    first = 2 * group_of(group).rank
    return x.new_empty(x.shape[0], heads[first + 1] - heads[first], tokens[-1], x.shape[3])


def _as_tokens(
    x: Tensor, group: int, tokens: Sequence[int], heads: Sequence[int], dtype: torch.dtype
) -> Tensor:
    first = 2 * group_of(group).rank
    return x.new_empty(x.shape[0], heads[-1], tokens[first + 1] - tokens[first], x.shape[3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.rest = inputs[1:]


def _to_heads_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    return to_tokens(grad, *ctx.rest), None, None, None, None


def _to_tokens_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    return to_heads(grad, *ctx.rest), None, None, None, None


to_heads.register_fake(_as_heads)
to_tokens.register_fake(_as_tokens)
to_heads.register_autograd(_to_heads_backward, setup_context=_keep)
to_tokens.register_autograd(_to_tokens_backward, setup_context=_keep)

__all__ = ["flat", "to_heads", "to_tokens"]
