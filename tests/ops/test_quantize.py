"""Tests of block quantisation: tables, properties of any input, non-finite values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xds.ops.kernels.quantize import (
    BLOCKS,
    SMALLEST,
    block_count,
    dequantize_,
    quantize_,
    value_bytes,
)
from xds.utils.errors import UsageError

LEVELS = {8: 127, 4: 7}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 2, 31, 32, 255, 256, 257, 1023, 4096, 5001]

dtypes = st.sampled_from(DTYPES)
bits_of = st.sampled_from([8, 4])
blocks = st.sampled_from(BLOCKS)


def quantized(
    flat: Tensor, bits: int = 8, block_numel: int = 32, error: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    values = torch.full((value_bytes(flat.numel(), bits),), 99, dtype=torch.uint8)
    absmax = torch.full((block_count(flat.numel(), block_numel),), -1.0)
    to = flat.device
    values, absmax = values.to(to), absmax.to(to)
    quantize_(flat, values, absmax, error, bits, block_numel)
    return values, absmax


def dequantized(
    packed: tuple[Tensor, Tensor],
    numel: int,
    bits: int = 8,
    block_numel: int = 32,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    values, absmax = packed
    out = torch.full((numel,), 77.0, dtype=dtype, device=values.device)
    dequantize_(values[None], absmax[None], out, bits, block_numel, 1.0)
    return out


def sample(numel: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    """Magnitudes from 1e-3 to 1e3, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(numel, generator=generator)
    flat *= 10 ** torch.empty(numel).uniform_(-3, 3, generator=generator)
    flat[::7] = 0
    return flat.to(dtype).to(device)


def test_table_of_int8() -> None:
    # absmax 127: a step is 1, halves go to the even neighbour
    flat = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.0, -0.0, 3.2])
    values, absmax = quantized(flat)
    assert values.view(torch.int8).tolist() == [127, -127, 0, 2, 2, 0, -2, 0, 0, 3]
    assert absmax.tolist() == [127.0]


def test_table_of_int4_puts_the_earlier_element_in_the_low_half() -> None:
    flat = torch.tensor([7.0, -7.0, 1.0, -1.0, 0.4, -0.6, 3.5])
    values, absmax = quantized(flat, bits=4)
    assert [f"{v:02x}" for v in values.tolist()] == ["97", "f1", "f0", "04"]  # a half byte is over
    assert absmax.tolist() == [7.0]
    back = dequantized((values, absmax), 7, bits=4)
    torch.testing.assert_close(back, torch.tensor([7.0, -7.0, 1.0, -1.0, 0.0, -1.0, 4.0]))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("bits", [8, 4])
def test_sizes_that_fill_no_block(numel: int, bits: int) -> None:
    flat = sample(numel, torch.float32, numel)
    values, absmax = quantized(flat, bits, 256)
    assert values.shape == ((numel * bits + 7) // 8,)
    for block, magnitude in enumerate(absmax.tolist()):
        assert magnitude == flat[block * 256 : (block + 1) * 256].abs().max()
    assert dequantized((values, absmax), numel, bits, 256).shape == (numel,)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), dtypes, bits_of, blocks, st.integers(0, 2**31))
def test_error_is_at_most_half_a_step_and_the_largest_survives(
    numel: int, dtype: torch.dtype, bits: int, block_numel: int, seed: int
) -> None:
    flat = sample(numel, dtype, seed)
    packed = quantized(flat, bits, block_numel)
    back = dequantized(packed, numel, bits, block_numel)
    largest = packed[1].repeat_interleave(block_numel)[:numel]
    half_step = largest / LEVELS[bits] / 2 * (1 + 1e-5)
    assert ((back - flat.float()).abs() <= half_step).all()
    at_peak = flat.float().abs() == largest
    assert torch.equal(back[at_peak], flat.float()[at_peak])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), dtypes, bits_of, blocks, st.integers(0, 2**31))
def test_quantising_what_came_back_gives_the_same_bytes(
    numel: int, dtype: torch.dtype, bits: int, block_numel: int, seed: int
) -> None:
    packed = quantized(sample(numel, dtype, seed), bits, block_numel)
    back = dequantized(packed, numel, bits, block_numel, dtype)
    again = quantized(back, bits, block_numel)
    assert torch.equal(packed[0], again[0])
    assert torch.equal(packed[1], again[1])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-127, 127), min_size=1, max_size=200), st.integers(-60, 60))
def test_what_int8_can_represent_returns_exactly(whole: list[int], exponent: int) -> None:
    flat = torch.tensor([127, *whole], dtype=torch.float32) * 2.0**exponent
    values, absmax = quantized(flat, 8, 256)
    assert values.view(torch.int8).tolist() == [127, *whole]
    torch.testing.assert_close(
        dequantized((values, absmax), flat.numel(), 8, 256), flat, rtol=2e-7, atol=0
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 500), dtypes, bits_of, st.integers(0, 2**31))
def test_feedback_keeps_exactly_what_was_lost(
    numel: int, dtype: torch.dtype, bits: int, seed: int
) -> None:
    flat, error = sample(numel, dtype, seed), sample(numel, torch.float32, seed + 1)
    whole = flat.float() + error
    packed = quantized(flat, bits, 32, error)
    assert torch.equal(error, whole - dequantized(packed, numel, bits))


def test_feedback_sends_in_the_mean_what_no_single_step_can() -> None:
    flat = torch.full((64,), 0.01)
    flat[0] = 1.0  # a step of int4 is 1/7: without feedback 0.01 would never be sent
    error, sent = torch.zeros(64), torch.zeros(64)
    for _ in range(100):
        sent += dequantized(quantized(flat, 4, 64, error), 64, 4, 64)
    torch.testing.assert_close(sent / 100, flat, rtol=0, atol=1 / 7 / 100)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_with_inf_or_nan_returns_as_nan_and_keeps_its_error(bad: float, bits: int) -> None:
    flat, error = sample(100, torch.float32, 1), sample(100, torch.float32, 2)
    flat[40] = bad
    before = error.clone()
    packed = quantized(flat, bits, 32, error)
    back = dequantized(packed, 100, bits)
    assert back[32:64].isnan().all()
    assert torch.cat((back[:32], back[64:])).isfinite().all()
    assert torch.equal(error[32:64], before[32:64])
    assert not torch.equal(error[:32], before[:32])
    assert packed[1].isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("size", [0.0, -0.0, 1e-45, 1e-38, SMALLEST / 2])
def test_zeros_and_what_is_almost_zero_come_back_as_zero(size: float) -> None:
    error = torch.zeros(50)
    packed = quantized(torch.full((50,), size), 8, 32, error)
    assert dequantized(packed, 50).tolist() == [0.0] * 50
    assert error.tolist() == [torch.tensor(size).item()] * 50


@pytest.mark.parametrize("size", [SMALLEST, 3.4e38])
def test_the_smallest_and_the_largest_magnitudes(size: float) -> None:
    flat = torch.tensor([size, -size, size / 127 * 64])
    torch.testing.assert_close(dequantized(quantized(flat), 3), flat, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_parts_are_summed_in_their_order_and_scaled(dtype: torch.dtype, bits: int) -> None:
    flats = [sample(777, torch.bfloat16, seed) for seed in range(4)]
    packed = [quantized(flat, bits, 64) for flat in flats]
    want = torch.zeros(777)
    for one in packed:
        want += dequantized(one, 777, bits, 64)
    out = torch.empty(777, dtype=dtype)
    values, absmax = (torch.stack(tensors) for tensors in zip(*packed, strict=True))
    dequantize_(values, absmax, out, bits, 64, 0.25)
    assert torch.equal(out, (want * 0.25).to(dtype))


def test_sizes_no_kernel_has_are_refused() -> None:
    with pytest.raises((UsageError, RuntimeError), match="block_numel = 48"):
        quantized(torch.ones(96), 8, 48)
    with pytest.raises((UsageError, RuntimeError), match="bits = 3"):
        quantize_(torch.ones(32), torch.ones(12, dtype=torch.uint8), torch.ones(1), None, 3, 32)


def test_registered_as_torch_wants_it() -> None:
    flat, error = sample(70, torch.float32, 3), torch.zeros(70)
    values, absmax = quantized(flat, 4, 32)
    ops = torch.ops.xds
    torch.library.opcheck(ops.quantize_.default, (flat, values, absmax, None, 4, 32))
    torch.library.opcheck(ops.quantize_.default, (flat, values, absmax, error, 4, 32))
    out = torch.empty(70, dtype=torch.bfloat16)
    torch.library.opcheck(ops.dequantize_.default, (values[None], absmax[None], out, 4, 32, 0.5))
