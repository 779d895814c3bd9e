"""The ops `quantize_` and `dequantize_`: a flat tensor as int8 or int4 with one magnitude per block.

    quantize_     flat [n] (+ error [n]) --one read--> values [n * bits / 8 bytes] + absmax [blocks]
    dequantize_   values [parts, bytes] + absmax [parts, blocks] --one read each--> out [n], their sum

Symmetric: with levels = 127 (8 bits) or 7 (4 bits), an element x of a block whose largest magnitude is absmax
is quantised to q = round(x * (levels / absmax)), half to even, and dequantised to absmax * (q * (1 / levels)).
So absmax itself is exact, and quantising the result again gives the same bytes. In 256-element blocks
1 element costs 1.016 bytes (8 bits) or 0.516 bytes (4 bits).

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022, section 2.1,
https://arxiv.org/abs/2110.02861; Wang et al., ZeRO++, 2023, sections 3.1 and 3.3,
https://arxiv.org/abs/2306.10209 (int8 weights are gathered, int4 gradients exchanged, then summed in full
precision: the sum over parts). Differs: any length, and the rounding error can be fed back (`error`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...utils.errors import UsageError
from .define import define

BLOCK_NUMEL = 256  # the default number of elements that share a magnitude
BLOCKS = (32, 64, 128, 256, 512, 1024)  # the block sizes that the kernels support
SMALLEST = 2.0**-100  # a block with a smaller absmax becomes zero: levels / absmax would overflow
_LEVELS = {8: 127, 4: 7}


def block_count(numel: int, block_numel: int) -> int:
    """Blocks of `numel` elements; the last may be shorter."""
    return -(-numel // block_numel)


def value_bytes(numel: int, bits: int) -> int:
    """Bytes of `numel` quantised elements, without their magnitudes."""
    return -(-numel * bits // 8)


def check_block(block_numel: int, bits: int = 8) -> None:
    """Raises UsageError: no kernel supports this block size or number of bits."""
    if block_numel not in BLOCKS:
        sizes = ", ".join(map(str, BLOCKS))
        raise UsageError(f"block_numel = {block_numel}: a block must have one of {sizes} elements.")
    if bits not in _LEVELS:
        raise UsageError(f"bits = {bits}: an element must have 8 or 4 bits.")


def in_blocks(flat: Tensor, block_numel: int) -> Tensor:
    """[n] -> fp32 [blocks, block_numel], padded with zeros."""
    blocks = block_count(flat.numel(), block_numel)
    padding = blocks * block_numel - flat.numel()
    return torch.nn.functional.pad(flat.float(), (0, padding)).view(blocks, block_numel)


def quantize_reference(
    flat: Tensor, values: Tensor, absmax: Tensor, error: Tensor | None, bits: int, block_numel: int
) -> None:
    """Write the quantised `flat` (+ `error`).

    A block with inf or nan is dequantised to nan in all elements and keeps its `error`, so a step that is
    skipped because of it loses nothing. A block without elements larger than 2^-100 becomes zero.

    Args:
        flat: [n] fp32, bf16 or fp16.
        values: uint8 [value_bytes(n, bits)]: int8, or pairs of int4, the earlier in the low half.
        absmax: fp32 [block_count(n, block_numel)].
        error: fp32 [n], the rounding error of the last call, added first and then replaced; or None.
        bits: 8 or 4.
        block_numel: 32, 64, ..., 1024.
    """
    check_block(block_numel, bits)
    levels = _LEVELS[bits]
    rows = in_blocks(flat if error is None else flat.float() + error, block_numel)
    largest = rows.abs().amax(dim=1)
    is_finite = largest.isfinite()
    largest.masked_fill_(largest < SMALLEST, 0.0).masked_fill_(~is_finite, torch.nan)
    # not `levels / largest`, which torch computes as levels * (1 / largest): rounded twice
    inverse = torch.full_like(largest, levels).div_(largest).masked_fill_(~(largest > 0), 0.0)
    whole = (rows * inverse[:, None]).round_().nan_to_num_(nan=0.0)
    absmax.copy_(largest)
    stored = whole.to(torch.int8).view(-1)
    if bits == 4:
        stored = (stored[::2] & 15) | (stored[1::2] << 4)
    values.copy_(stored.view(torch.uint8)[: values.numel()])
    if error is not None:
        lost = rows - largest[:, None] * (whole * (1 / levels))
        kept = torch.where(is_finite[:, None], lost, in_blocks(error, block_numel))
        error.copy_(kept.view(-1)[: error.numel()])


def dequantize_reference(
    values: Tensor, absmax: Tensor, out: Tensor, bits: int, block_numel: int, factor: float
) -> None:
    """Write factor * the sum of the parts, added in their order in fp32.

    Args:
        values: uint8 [parts, value_bytes(n, bits)], absmax: fp32 [parts, block_count(n, block_numel)]: the
            output of `quantize_` on one rank, or (parts > 1) on several ranks for the same elements.
        out: [n] fp32, bf16 or fp16, rounded to nearest even.
        factor: 1 / parts for their mean.
    """
    check_block(block_numel, bits)
    numel = out.numel()
    total = torch.zeros(numel, dtype=torch.float32, device=out.device)
    for part, magnitudes in zip(values, absmax, strict=True):
        whole = part.view(torch.int8)
        if bits == 4:
            whole = torch.stack(((whole << 4) >> 4, whole >> 4), dim=1).view(-1)
        rows = in_blocks(whole[:numel], block_numel)
        rows.mul_(1 / _LEVELS[bits]).mul_(magnitudes[:, None])
        total.add_(rows.view(-1)[:numel])
    out.copy_(total.mul_(factor))


quantize_ = define(
    "quantize_(Tensor flat, Tensor(a!) values, Tensor(b!) absmax, Tensor(c!)? error, int bits, "
    "int block_numel) -> ()",
    quantize_reference,
)
dequantize_ = define(
    "dequantize_(Tensor values, Tensor absmax, Tensor(a!) out, int bits, int block_numel, "
    "float factor) -> ()",
    dequantize_reference,
)
