"""Blocks of integers and packed signs: tables, and what holds for any input. Their kernels: test_kernels.py."""

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
from xds.ops.kernels.signs import scale_count, sign_bytes, sign_pack_, sign_unpack_
from xds.utils.errors import UsageError

LEVELS = {8: 127, 4: 7}
BAD = (math.inf, -math.inf, math.nan)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
seeds = st.integers(0, 2**31)
ANY_INPUT = settings(max_examples=60)


def sample(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Magnitudes from 1e-2 to 1e2, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(numel, generator=generator)
    flat *= 10 ** torch.empty(numel).uniform_(-2, 2, generator=generator)
    flat[::7] = 0
    return flat.to(dtype)


# -- integers ----------------------------------------------------------------------------------------------


def quantized(
    flat: Tensor, bits: int = 8, block: int = 32, error: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    values = torch.full((value_bytes(flat.numel(), bits),), 99, dtype=torch.uint8)
    absmax = torch.full((block_count(flat.numel(), block),), -1.0)
    quantize_(flat, values, absmax, error, bits, block)
    return values, absmax


def dequantized(
    packed: tuple[Tensor, Tensor],
    numel: int,
    bits: int = 8,
    block: int = 32,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    out = torch.full((numel,), 77.0, dtype=dtype)
    dequantize_(packed[0][None], packed[1][None], out, bits, block, 1.0)
    return out


def test_tables_of_integers() -> None:
    # absmax 127: a step is 1, halves go to the even neighbour
    flat = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.0, -0.0, 3.2])
    values, absmax = quantized(flat)
    assert values.view(torch.int8).tolist() == [127, -127, 0, 2, 2, 0, -2, 0, 0, 3]
    assert absmax.tolist() == [127.0]
    # 4 bits: the earlier element is in the low half
    flat = torch.tensor([7.0, -7.0, 1.0, -1.0, 0.4, -0.6, 3.5])
    values, absmax = quantized(flat, bits=4)
    assert [f"{v:02x}" for v in values.tolist()] == ["97", "f1", "f0", "04"]  # a half byte is over
    back = dequantized((values, absmax), 7, bits=4)
    torch.testing.assert_close(back, torch.tensor([7.0, -7.0, 1.0, -1.0, 0.0, -1.0, 4.0]))


@ANY_INPUT
@given(st.integers(1, 700), dtypes, st.sampled_from([8, 4]), st.sampled_from(BLOCKS), seeds)
def test_integers_of_any_input(
    numel: int, dtype: torch.dtype, bits: int, block: int, seed: int
) -> None:
    """The error is at most half a step, the largest element survives, and a second time changes nothing."""
    flat, error = sample(numel, dtype, seed), sample(numel, torch.float32, seed + 1)
    packed = quantized(flat, bits, block)
    for at, magnitude in enumerate(packed[1].tolist()):
        assert magnitude == flat[at * block : (at + 1) * block].abs().max()
    back = dequantized(packed, numel, bits, block)
    largest = packed[1].repeat_interleave(block)[:numel]
    assert ((back - flat.float()).abs() <= largest / LEVELS[bits] / 2 * (1 + 1e-5)).all()
    at_peak = flat.float().abs() == largest
    assert torch.equal(back[at_peak], flat.float()[at_peak])
    again = quantized(dequantized(packed, numel, bits, block, dtype), bits, block)
    assert torch.equal(packed[0], again[0]) and torch.equal(packed[1], again[1])
    whole = flat.float() + error
    packed = quantized(flat, bits, block, error)  # `error` is now exactly what was lost
    assert torch.equal(error, whole - dequantized(packed, numel, bits, block))


def test_feedback_of_integers_sends_in_the_mean_what_no_single_step_can() -> None:
    flat = torch.full((64,), 0.01)
    flat[0] = 1.0  # a step of int4 is 1/7: without feedback 0.01 would never be sent
    error, sent = torch.zeros(64), torch.zeros(64)
    for _ in range(100):
        sent += dequantized(quantized(flat, 4, 64, error), 64, 4, 64)
    torch.testing.assert_close(sent / 100, flat, rtol=0, atol=1 / 7 / 100)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_with_inf_or_nan_returns_as_nan_and_keeps_its_error(bits: int) -> None:
    for bad in BAD:
        flat, error = sample(100, seed=1), sample(100, seed=2)
        flat[40] = bad
        before = error.clone()
        packed = quantized(flat, bits, 32, error)
        back = dequantized(packed, 100, bits)
        assert back[32:64].isnan().all()
        assert torch.cat((back[:32], back[64:])).isfinite().all()
        assert torch.equal(error[32:64], before[32:64])
        assert not torch.equal(error[:32], before[:32])
        assert packed[1].isnan().tolist() == [False, True, False, False]


def test_the_smallest_and_the_largest_magnitudes() -> None:
    for size in (0.0, -0.0, 1e-45, 1e-38, SMALLEST / 2):  # almost zero comes back as zero
        error = torch.zeros(50)
        packed = quantized(torch.full((50,), size), 8, 32, error)
        assert dequantized(packed, 50).tolist() == [0.0] * 50
        assert error.tolist() == [torch.tensor(size).item()] * 50
    for size in (SMALLEST, 3.4e38):
        flat = torch.tensor([size, -size, size / 127 * 64])
        torch.testing.assert_close(dequantized(quantized(flat), 3), flat, rtol=1e-6, atol=0)


def test_sizes_no_kernel_has_are_refused() -> None:
    with pytest.raises((UsageError, RuntimeError), match="block_numel = 48"):
        quantized(torch.ones(96), 8, 48)
    with pytest.raises((UsageError, RuntimeError), match="bits = 3"):
        quantize_(torch.ones(32), torch.ones(12, dtype=torch.uint8), torch.ones(1), None, 3, 32)
    with pytest.raises((UsageError, RuntimeError), match="block_numel = 100"):
        packed_signs(torch.ones(100), torch.zeros(100), 100)


# -- signs -------------------------------------------------------------------------------------------------


def packed_signs(
    value: Tensor, error: Tensor, block: int = 32, *, rms: bool = False
) -> tuple[Tensor, Tensor]:
    signs = torch.full((sign_bytes(value.numel()),), 99, dtype=torch.uint8)
    scales = torch.full((scale_count(value.numel(), block),), -1.0)
    sign_pack_(value, error, signs, scales, block, rms)
    return signs, scales


def unpacked(both: tuple[Tensor, Tensor], numel: int, block: int = 32) -> Tensor:
    out = torch.full((numel,), 77.0)
    sign_unpack_(both[0][None], both[1][None], out, block, 1.0)
    return out


def test_tables_of_signs_scales_errors_and_gains() -> None:
    value = torch.tensor([3.0, -4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 2.0])
    signs, scales = packed_signs(value, torch.zeros(10))
    assert [f"{byte:08b}" for byte in signs.tolist()] == ["11111101", "00000010"]  # bit 0 is right
    assert scales.tolist() == [1.0]  # (3 + 4 + 1 + 2) / 10, not / 32
    assert packed_signs(value, torch.zeros(10), rms=True)[1].item() == pytest.approx(math.sqrt(3))
    error = torch.tensor([1.0, 0.0, -1.0])
    both = packed_signs(torch.tensor([1.0, -3.0, 2.0]), error)
    assert both[1].tolist() == [2.0]  # of 2, -3 and 1
    assert unpacked(both, 3).tolist() == [2.0, -2.0, 2.0] and error.tolist() == [0.0, -1.0, -1.0]
    error, signs, scales = torch.tensor([1.0, 0.0, -1.0]), signs[:1], scales[:1]
    sign_pack_(torch.tensor([1.0, -3.0, 2.0]), error, signs, scales, 32, False, 0.25)
    assert scales.tolist() == [0.5] and error.tolist() == [1.5, -2.5, 0.5]  # a quarter is sent
    value = torch.cat([torch.zeros(70), torch.ones(30)])  # blocks of zeros stay zero
    assert unpacked(packed_signs(value, torch.zeros(100)), 100)[:64].tolist() == [0.0] * 64
    for block, scale in ((0, [0.0]), (32, [])):
        assert packed_signs(torch.zeros(0), torch.zeros(0), block)[1].tolist() == scale


@ANY_INPUT
@given(st.integers(1, 2500), dtypes, st.sampled_from([0, 32, 64, 256, 1024]), st.booleans(), seeds)
def test_signs_of_any_input(
    numel: int, dtype: torch.dtype, block: int, rms: bool, seed: int
) -> None:
    value, error = sample(numel, dtype, seed), sample(numel, torch.float32, seed + 1)
    buffer = value.float() + error
    both = packed_signs(value, error, block, rms=rms)
    sent = unpacked(both, numel, block)
    assert torch.equal(torch.signbit(sent), torch.signbit(buffer))
    assert torch.equal(error, buffer - sent)  # exactly what was not sent
    for at, scale in enumerate(both[1].tolist()):
        part = buffer[at * (block or numel) : (at + 1) * (block or numel)].double()
        want = part.square().mean().sqrt() if rms else part.abs().mean()
        assert scale == pytest.approx(want.item(), rel=1e-6)
    again = packed_signs(sent, torch.zeros(numel), block)
    assert torch.equal(both[0], again[0])
    torch.testing.assert_close(both[1], again[1], rtol=2e-7, atol=0)


def test_feedback_of_signs_sends_in_the_mean_what_no_single_step_can() -> None:
    value, error, sent = torch.linspace(-1, 1, 64), torch.zeros(64), torch.zeros(64)
    for _ in range(400):
        sent += unpacked(packed_signs(value, error, 64), 64, 64)
    torch.testing.assert_close(sent / 400, value, rtol=0, atol=0.05)


@pytest.mark.parametrize("block", [0, 32])
def test_inf_or_nan_shows_in_the_scale_and_leaves_the_error_alone(block: int) -> None:
    for bad, rms in ((bad, rms) for bad in BAD for rms in (False, True)):
        value, error = sample(100, seed=5), sample(100, seed=6)
        value[40] = bad
        before = error.clone()
        both = packed_signs(value, error, block, rms=rms)
        hit = slice(32, 64) if block else slice(0, 100)
        assert torch.equal(error[hit], before[hit])
        assert not unpacked(both, 100, block)[hit].isfinite().any()
        if block:
            assert both[1].isfinite().tolist() == [True, False, True, True]
            assert not torch.equal(error[:32], before[:32])
