"""Optimizer states of 8 bits an element: rows of 256 short floats, with exponents from a base of the row on.

    row, 260 bytes    | 256 codes | base, int32 |

    int8     means      a sign, 4 bits of exponent, 3 of mantissa; 0 is 0
    uint8    squares    5 bits of exponent, 3 of mantissa; all are above 0, but in a row of zeros (base 0)

    the bits of a value in fp32 = sign | (base + magnitude of the code) << 20

Only integers are added and shifted, so all devices have the same bits: `cpu/coded.h`, `cuda/coded.cuh`.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022, section 2,
https://arxiv.org/abs/2110.02861. Differs: short floats instead of a table, and rounding at random, with the
value as mean. To nearest a square could not decay: a step changes it by less than the distance of two codes.
Squares below 2^-31 of the largest one of a row become that, not 0: an update divides by their root. Means below
2^-15 of the largest one become 0. What is not finite becomes the largest value. A decoded value has the same
code again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rounding import write_rounded

BLOCK_NUMEL = 256
ROW_BYTES = BLOCK_NUMEL + 4
_SHIFT = 20  # bits of an fp32 mantissa that a code lacks
_LARGEST = 0x7F7FFFFF  # finite
_LEVELS = {torch.int8: 128, torch.uint8: 256}  # magnitudes of a code: 8 of each exponent


def is_coded(state: Tensor) -> bool:
    """`state` has codes."""
    return state.dtype in _LEVELS and state.dim() == 2 and state.shape[1] == ROW_BYTES


def new_codes(numel: int, device: torch.device, *, of_squares: bool) -> Tensor:
    """The codes of zeros: int8 or uint8 [n / 256, 260]. numel: a multiple of 256."""
    dtype = torch.uint8 if of_squares else torch.int8
    return torch.zeros(numel // BLOCK_NUMEL, ROW_BYTES, dtype=dtype, device=device)


def state_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of a state of `numel` elements; int8: of codes, for a multiple of 256 elements."""
    return numel // BLOCK_NUMEL * ROW_BYTES if dtype == torch.int8 else numel * dtype.itemsize


def rows_of(start: int, stop: int) -> slice:
    """The rows that have elements [start, stop)."""
    return slice(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))


def place_of(state: Tensor, start: int) -> int:
    """The place in the memory of `state` of its element `start`; of codes, of the row that begins with it."""
    return start // BLOCK_NUMEL * ROW_BYTES if is_coded(state) else start


def has_elements(state: Tensor, numel: int) -> bool:
    """`state` has an element for each of `numel`."""
    return state.numel() == place_of(state, numel) and (
        not is_coded(state) or numel % BLOCK_NUMEL == 0
    )


def decoded(codes: Tensor) -> Tensor:
    """The values of rows, fp32 [256 rows]."""
    base = codes[:, BLOCK_NUMEL:].clone().view(torch.int32)
    steps = codes[:, :BLOCK_NUMEL].to(torch.int32)
    sizes = steps.abs()
    values = ((base + sizes) << _SHIFT).view(torch.float32)
    is_zero = base == 0 if codes.dtype == torch.uint8 else sizes == 0
    values = torch.where(is_zero, 0.0, values)
    return torch.where(steps < 0, -values, values).view(-1)


def encode(codes: Tensor, values: Tensor, draws: Tensor | None = None) -> None:
    """codes = values [256 rows], rounded by 16 random bits for each, see ops/rounding.py; None: to nearest."""
    levels = _LEVELS[codes.dtype]
    values = values.float().view(-1, BLOCK_NUMEL)
    bits = (values.view(torch.int32) & 0x7FFFFFFF).clamp_(max=_LARGEST)
    largest = bits.amax(1, keepdim=True) >> 23  # the exponent
    base = ((largest + 1 - levels // 8) * 8).clamp_(8)
    base = torch.where(largest == 0, 0, base)
    part: Tensor | int = 1 << (_SHIFT - 1)
    if draws is not None:
        part = draws.view_as(values).to(torch.int32) << (_SHIFT - 16)
    sizes = (((bits + part) >> _SHIFT) - base).clamp_(0, levels - 1)
    sizes = torch.where(largest == 0, 0, sizes)
    sizes = torch.where((values < 0) & (codes.dtype == torch.int8), -sizes, sizes)
    codes[:, :BLOCK_NUMEL] = sizes.to(codes.dtype)
    codes[:, BLOCK_NUMEL:] = base.to(torch.int32).view(codes.dtype)


def wide(state: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a state in `dtype`, [n]; a state that has it is returned itself."""
    return decoded(state).to(dtype) if is_coded(state) else state.to(dtype)


def write_state(state: Tensor, values: Tensor, draws: Tensor | None) -> None:
    """state = values [n], rounded by `draws` if it has fewer bits than fp32."""
    if is_coded(state):
        encode(state, values, draws)
    else:
        write_rounded(state, values, draws)


__all__ = [
    "BLOCK_NUMEL",
    "ROW_BYTES",
    "decoded",
    "encode",
    "has_elements",
    "is_coded",
    "new_codes",
    "place_of",
    "rows_of",
    "state_bytes",
    "wide",
    "write_state",
]
