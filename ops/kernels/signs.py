"""The ops `sign_pack_` and `sign_unpack_`: one bit per element, one scale per block, with error feedback.

    sign_pack_     buffer = value [n] + error [n]; signs: 8 per byte; scale: gain * the block's magnitude;
                   error = buffer - scale * sign, all in one read (one scale for all of n: two reads)
    sign_unpack_   signs [parts, bytes] + scales [parts, blocks] -> out [n] = factor * sum of scale * sign

With one scale per block of 1024, 1 element costs 0.129 bytes. A block of zeros stays zero.

Source: Tang et al., 1-bit Adam, 2021, algorithm 1, https://arxiv.org/abs/2102.02888: a scale for all of a
tensor (block_numel = 0) that keeps its norm (root_mean_square). Karimireddy et al., Error Feedback Fixes
SignSGD, 2019, section 4, https://arxiv.org/abs/1901.09847: the mean magnitude, which leaves the least error.
Differs from DeepSpeed: the padding of a last block or byte is no part of the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import device_of
from .define import define
from .quantize import block_count, check_block, in_blocks

BLOCK_NUMEL = 1024  # the default number of elements that share a scale


def sign_bytes(numel: int) -> int:
    """Bytes of `numel` packed signs, without their scales."""
    return -(-numel // 8)


def scale_count(numel: int, block_numel: int) -> int:
    """The number of scales for `numel` elements: one per block, or one in total where block_numel is 0."""
    return 1 if block_numel == 0 else block_count(numel, block_numel)


def sign_pack_reference(
    value: Tensor,
    error: Tensor,
    signs: Tensor,
    scales: Tensor,
    block_numel: int,
    root_mean_square: bool,
    gain: float = 1.0,
) -> None:
    """Write the signs and scales of value + error, and the remaining difference to `error`.

    The sign is the sign bit: zero counts as positive, and its error is its block's scale. With inf or nan the
    scale is inf or nan and the block keeps its `error`, so a step that is skipped because of it loses nothing.

    Args:
        value: [n] fp32, bf16 or fp16, the momentum or gradient. error: fp32 [n], zeros at the start.
        signs: uint8 [sign_bytes(n)]; bit i of byte j is set where element 8 j + i is positive; 0 after n.
        scales: fp32 [scale_count(n, block_numel)].
        block_numel: 32, 64, ..., 1024, or 0 for one scale in total.
        root_mean_square: the scale keeps the block's norm; else it is the mean magnitude.
        gain: the scale is multiplied with it: so much of the sum is sent, and the rest stays in `error`.
    """
    numel = value.numel()
    if block_numel:
        check_block(block_numel)
    width = block_numel or max(numel, 1)
    buffer = value.float() + error
    rows = in_blocks(buffer, width)
    scale = _mean_sizes(rows, numel, root_mean_square).mul_(gain)
    scales.zero_()
    scales[: scale.numel()].copy_(scale)  # n = 0 has no row, but one scale

    is_positive = torch.signbit(buffer).logical_not_()
    bits = torch.nn.functional.pad(is_positive, (0, -numel % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    signs.copy_((bits * weights).sum(dim=1).to(torch.uint8))

    sent = torch.where(torch.signbit(rows), -scale[:, None], scale[:, None])
    kept = torch.where(scale[:, None].isfinite(), rows - sent, in_blocks(error, width))
    error.copy_(kept.view(-1)[:numel])


def _mean_sizes(rows: Tensor, numel: int, root_mean_square: bool) -> Tensor:
    """The mean magnitude of each row, or the root of its mean square, fp32. After `numel` elements is padding.

    Without fp64 rows are divided by their largest magnitude, so that no square is out of range.
    """
    has_fp64 = device_of(rows.device).has_fp64
    largest = torch.ones_like(rows[:, 0])
    if has_fp64:
        rows = rows.double()
    elif rows.shape[0]:
        largest = rows.abs().amax(1)
        largest = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
        rows = rows / largest[:, None]
    counts = rows.new_full((rows.shape[0],), rows.shape[1])
    counts[-1:] -= rows.numel() - numel
    means = (rows.square() if root_mean_square else rows.abs()).sum(dim=1) / counts
    return (means.sqrt_() if root_mean_square else means).float().mul_(largest)


def sign_unpack_reference(
    signs: Tensor, scales: Tensor, out: Tensor, block_numel: int, factor: float
) -> None:
    """Write factor * the sum over parts of scale * sign, added in their order in fp32.

    Args:
        signs: uint8 [parts, sign_bytes(n)], scales: fp32 [parts, scale_count(n, block_numel)]: the output of
            `sign_pack_` on one rank, or (parts > 1) on several ranks for the same elements.
        out: [n] fp32, bf16 or fp16, rounded to nearest even.
        factor: 1 / parts for their mean.
    """
    numel = out.numel()
    if block_numel:
        check_block(block_numel)
    width = block_numel or max(numel, 1)
    total = torch.zeros(numel, dtype=torch.float32, device=out.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=out.device)
    for part, scale in zip(signs, scales, strict=True):
        bits = (part[:, None] >> shifts).bitwise_and_(1).view(-1)[:numel]
        rows = in_blocks(bits, width).mul_(2).sub_(1)  # 1 and 0 -> 1 and -1
        rows.mul_(scale[: rows.shape[0], None])
        total.add_(rows.view(-1)[:numel])
    out.copy_(total.mul_(factor))


sign_pack_ = define(
    "sign_pack_(Tensor value, Tensor(a!) error, Tensor(b!) signs, Tensor(c!) scales, int block_numel, "
    "bool root_mean_square, float gain=1.0) -> ()",
    sign_pack_reference,
)
sign_unpack_ = define(
    "sign_unpack_(Tensor signs, Tensor scales, Tensor(a!) out, int block_numel, float factor) -> ()",
    sign_unpack_reference,
)
