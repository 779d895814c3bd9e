"""Attention of a layout by torch's FlexAttention, on a GPU: blocks outside of the layout are skipped."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..device import device_of

TILE = 128  # FlexAttention's own block: smaller ones of a layout are looked up in it
REMEMBERED = 32


def flex(  # noqa: PLR0913 (what attention has)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    block: int,
    *,
    padding: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """q [B, H, L, D], k and v [B, Hkv, L, D] -> [B, H, L, D]; layout on the CPU, padding [B, L] of bool."""
    small = (layout != 0).to(torch.uint8).contiguous()
    key = small.numpy().tobytes(), tuple(small.shape), block, is_causal, q.shape[2], str(q.device)
    mask = _mask(*key) if padding is None else _masked(_mask(*key), padding)
    attend = _compiled() if device_of(q.device).has_streams else flex_attention
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=REMEMBERED)
def _mask(
    data: bytes,
    shape: tuple[int, int, int],
    block: int,
    is_causal: bool,
    length: int,
    device: str,
) -> BlockMask:
    """The mask of a layout. Built from counts of blocks: a mask of elements would have length^2."""
    layout = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape).bool()
    if is_causal:
        layout = layout.tril()
    per = max(1, TILE // block)
    size, n = per * block, shape[1]
    num = -(-n // per)
    fine = torch.zeros(shape[0], num * per, num * per, dtype=torch.bool)
    fine[:, :n, :n] = layout
    blocks = fine.view(shape[0], num, per, num, per)
    some, full = blocks.any(4).any(2), blocks.all(4).all(2)
    if is_causal:
        full &= ~torch.eye(num, dtype=torch.bool)
    if num * size != length:
        full[:, -1] = full[:, :, -1] = False
    seen = fine.to(device)

    def visible(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        head = h if shape[0] > 1 else h * 0
        inside = seen[head, row // block, col // block]
        return inside & (row >= col) if is_causal else inside

    return BlockMask.from_kv_blocks(
        *_lists(some & ~full, device),
        *_lists(full, device),
        BLOCK_SIZE=size,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def _masked(mask: BlockMask, padding: Tensor) -> BlockMask:
    """The mask, without keys that are padding. All its blocks are looked up by elements."""
    batch = padding.shape[0]
    inner = mask.mask_mod

    def visible(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return inner(b, h, row, col) & padding[b, col]

    counts, order = _lists(mask.to_dense().bool()[0], str(padding.device))
    return BlockMask.from_kv_blocks(
        counts.repeat(batch, 1, 1),
        order.repeat(batch, 1, 1, 1),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=visible,
        seq_lengths=mask.seq_lengths,
    )


def _lists(blocks: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Of [heads, n, n]: how many blocks a row has, [1, heads, n], and which, [1, heads, n, n]."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None].to(device), order[None].to(device)


__all__ = ["flex"]
