"""Stochastic rounding to 16 bits, by random numbers that are keyed by seed, parameter, element and step.

Source: Gupta et al., Deep learning with limited numerical precision, 2015, section 3,
https://arxiv.org/abs/1502.02551; the hash is lowbias32 of Wellons, Prospecting for Hash Functions, 2018. A
number is a function of its key alone. So bits depend neither on ranks, stage or threads, nor on a resume.

    key(seed, name) --step--> key of the step --xor index / 2--> hash --> 16 bits for each of two elements

The rows of `draws`, int64 [k, 3], cover a flat range: the first element of a run, its index in its parameter,
and the key. `narrow.h` and `rounding.cuh` have the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor

COMPILED = "_orig_mod."
WORD = 1 << 32
MASK = WORD - 1
STEP = 0x9E3779B9  # the golden ratio, so that the keys of two steps have no simple relation


def draw_rows(runs: Iterable[tuple[int, int, int, str]], seed: int) -> Tensor:
    """The rows for runs (start, stop, index of the first element in its parameter, name), in order.

    A name counts without the prefix that torch.compile adds. Elements before, between and after the runs get
    the numbers of a neighbour.
    """
    rows = [[0, 0, 0]]
    for start, stop, index, name in runs:
        if start < stop and rows[-1][0] == start:
            rows.pop()
        while start < stop:
            high, low = divmod(index, WORD)
            rows.append([start, low, _key(f"{seed} {high} {name.replace(COMPILED, '')}")])
            start, index = start + WORD - low, index + WORD - low
    return torch.tensor(rows, dtype=torch.int64)


def _key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def rows_from(draws: Tensor, start: int) -> Tensor:
    """The rows of the part of a range that begins at its element `start`."""
    return draws - draws.new_tensor([start, 0, 0])


def drawn(draws: Tensor, step: int, numel: int) -> Tensor:
    """The random numbers of `numel` elements from the start of the range: 16 bits each, in int64 [numel]."""
    elements = torch.arange(numel, device=draws.device)
    row = draws[(torch.searchsorted(draws[:, 0].contiguous(), elements, right=True) - 1).clamp_(0)]
    index = (row[:, 1] + elements - row[:, 0]) & MASK
    key = row[:, 2]
    keys = _mixed(((key & MASK) + step * STEP) & MASK) ^ ((key >> 32) & MASK)
    return (_mixed((index >> 1) ^ keys) >> (16 * (index & 1))) & 0xFFFF


def _mixed(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = _times(x, 0x846CA68B)
    return x ^ (x >> 16)


def _times(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2^32, in int64, which a factor of 32 bits would leave."""
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + ((x * high) << 16)) & MASK


def upper_half(values: Tensor) -> Tensor:
    """fp32 `values` as bf16, to nearest; from the middle of two to the larger magnitude: see ops/halves.py."""
    bits = values.contiguous().view(torch.int32)
    rounded = (bits + 0x8000) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return torch.where(is_nan, 0x7FC0, rounded).to(torch.int16).view(torch.bfloat16)


def narrowed(values: Tensor, dtype: torch.dtype, *, rounds_away: bool) -> Tensor:
    """`values` in `dtype`, rounded to nearest even, or as `upper_half`."""
    return upper_half(values) if rounds_away else values.to(dtype)


def write_rounded(target: Tensor, values: Tensor, draws: Tensor | None) -> None:
    """target = values; a target of 16 bits is rounded by the lowest bits of `draws` [n], or to nearest.

    Of the two neighbours of a value, the further one is chosen with the probability of its share of the way.
    """
    if draws is None or target.dtype.itemsize > 2:
        target.copy_(values)
        return
    bits = values.view(torch.int32).to(torch.int64) & MASK
    nearest = values.to(target.dtype).view(torch.int16)
    if target.dtype == torch.bfloat16:
        chosen = (bits + draws) >> 16
        is_special = (bits & 0x7F800000) == 0x7F800000
    else:
        chosen = _to_fp16(bits, draws & 0x1FFF)
        is_special = (bits & 0x7FFFFFFF) >= 0x47800000
    rounded = torch.where(is_special, nearest, chosen.to(torch.int16))
    target.copy_(rounded.view(target.dtype))


def _to_fp16(bits: Tensor, part: Tensor) -> Tensor:
    """The bits of fp16 for those of fp32 below 2^16; above the largest value they stay the largest one."""
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude - (112 << 23) + part) >> 13).clamp_(max=0x7BFF)
    is_small = magnitude < 0x38800000  # 2^-14; below it in units of 2^-24
    size = torch.where(is_small, magnitude, 0).to(torch.int32).view(torch.float32)
    small = (size * 2.0**24 + part.to(torch.float32) * 2.0**-13).to(torch.int64)
    return ((bits >> 16) & 0x8000) | torch.where(is_small, small, normal)


__all__ = ["draw_rows", "drawn", "rows_from", "write_rounded"]
