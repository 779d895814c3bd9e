"""Tests of packed signs with error feedback: tables, properties of any input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xds.ops.kernels.signs import scale_count, sign_bytes, sign_pack_, sign_unpack_
from xds.utils.errors import UsageError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS = [0, 32, 64, 256, 1024]

dtypes = st.sampled_from(DTYPES)
blocks = st.sampled_from(BLOCKS)


def packed(
    value: Tensor, error: Tensor, block_numel: int = 32, *, root_mean_square: bool = False
) -> tuple[Tensor, Tensor]:
    numel, to = value.numel(), value.device
    signs = torch.full((sign_bytes(numel),), 99, dtype=torch.uint8, device=to)
    scales = torch.full((scale_count(numel, block_numel),), -1.0, device=to)
    sign_pack_(value, error, signs, scales, block_numel, root_mean_square)
    return signs, scales


def unpacked(both: tuple[Tensor, Tensor], numel: int, block_numel: int = 32) -> Tensor:
    signs, scales = both
    out = torch.full((numel,), 77.0, device=signs.device)
    sign_unpack_(signs[None], scales[None], out, block_numel, 1.0)
    return out


def sample(numel: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(numel, generator=generator)
    flat *= 10 ** torch.empty(numel).uniform_(-2, 2, generator=generator)
    return flat.to(dtype).to(device)


def test_table_of_signs_and_both_scales() -> None:
    value = torch.tensor([3.0, -4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 2.0])
    signs, scales = packed(value, torch.zeros(10))
    assert [f"{byte:08b}" for byte in signs.tolist()] == ["11111101", "00000010"]  # bit 0 is right
    assert scales.tolist() == [1.0]  # (3 + 4 + 1 + 2) / 10, not / 32
    _, scales = packed(value, torch.zeros(10), root_mean_square=True)
    assert scales.item() == pytest.approx(math.sqrt(30 / 10))


def test_a_gain_sends_a_share_and_keeps_the_rest() -> None:
    error, signs = torch.tensor([1.0, 0.0, -1.0]), torch.empty(1, dtype=torch.uint8)
    scales = torch.empty(1)
    sign_pack_(torch.tensor([1.0, -3.0, 2.0]), error, signs, scales, 32, False, 0.25)
    assert scales.tolist() == [0.5] and error.tolist() == [1.5, -2.5, 0.5]  # of 2, -3 and 1


def test_table_of_errors() -> None:
    error = torch.tensor([1.0, 0.0, -1.0])
    both = packed(torch.tensor([1.0, -3.0, 2.0]), error)
    assert both[1].tolist() == [2.0]  # of 2, -3 and 1
    assert unpacked(both, 3).tolist() == [2.0, -2.0, 2.0]
    assert error.tolist() == [0.0, -1.0, -1.0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2500), dtypes, blocks, st.booleans(), st.integers(0, 2**31))
def test_feedback_keeps_exactly_what_was_not_sent(
    numel: int, dtype: torch.dtype, block_numel: int, root_mean_square: bool, seed: int
) -> None:
    value, error = sample(numel, dtype, seed), sample(numel, torch.float32, seed + 1)
    buffer = value.float() + error
    both = packed(value, error, block_numel, root_mean_square=root_mean_square)
    sent = unpacked(both, numel, block_numel)
    assert torch.equal(torch.signbit(sent), torch.signbit(buffer))
    assert torch.equal(error, buffer - sent)
    width = block_numel or numel
    for at, scale in enumerate(both[1].tolist()):
        block = buffer[at * width : (at + 1) * width].double()
        want = block.square().mean().sqrt() if root_mean_square else block.abs().mean()
        assert scale == pytest.approx(want.item(), rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 1500), blocks, st.integers(0, 2**31))
def test_packing_what_came_back_gives_the_same_signs(
    numel: int, block_numel: int, seed: int
) -> None:
    first = packed(sample(numel, torch.float32, seed), torch.zeros(numel), block_numel)
    sent = unpacked(first, numel, block_numel)
    again = packed(sent, torch.zeros(numel), block_numel)
    assert torch.equal(first[0], again[0])
    torch.testing.assert_close(first[1], again[1], rtol=2e-7, atol=0)


def test_feedback_sends_in_the_mean_what_no_single_step_can() -> None:
    value, error, sent = torch.linspace(-1, 1, 64), torch.zeros(64), torch.zeros(64)
    for _ in range(400):
        sent += unpacked(packed(value, error, 64), 64, 64)
    torch.testing.assert_close(sent / 400, value, rtol=0, atol=0.05)


def test_mean_magnitude_leaves_less_error_and_the_norm_keeps_the_norm() -> None:
    value = sample(256, torch.float32, 4)
    norms = {}
    for root_mean_square in (False, True):
        error = torch.zeros(256)
        both = packed(value, error, 0, root_mean_square=root_mean_square)
        norms[root_mean_square] = unpacked(both, 256, 0).norm(), error.norm()
    assert norms[False][1] < norms[True][1]
    torch.testing.assert_close(norms[True][0], value.norm())


def test_blocks_of_zeros_stay_zero() -> None:
    value = torch.zeros(100)
    value[70:] = 1.0
    error = torch.zeros(100)
    sent = unpacked(packed(value, error), 100)
    assert sent[:64].tolist() == [0.0] * 64
    assert packed(torch.zeros(0), torch.zeros(0), 0)[1].tolist() == [0.0]
    assert packed(torch.zeros(0), torch.zeros(0), 32)[1].tolist() == []


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("block_numel", [0, 32])
@pytest.mark.parametrize("root_mean_square", [False, True])
def test_inf_or_nan_shows_in_the_scale_and_leaves_the_error_alone(
    bad: float, block_numel: int, root_mean_square: bool
) -> None:
    value, error = sample(100, torch.float32, 5), sample(100, torch.float32, 6)
    value[40] = bad
    before = error.clone()
    both = packed(value, error, block_numel, root_mean_square=root_mean_square)
    hit = slice(32, 64) if block_numel else slice(0, 100)
    assert torch.equal(error[hit], before[hit])
    assert not unpacked(both, 100, block_numel)[hit].isfinite().any()
    if block_numel:
        assert both[1].isfinite().tolist() == [True, False, True, True]
        assert not torch.equal(error[:32], before[:32])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_numel", BLOCKS)
def test_ranks_are_summed_in_their_order_and_averaged(dtype: torch.dtype, block_numel: int) -> None:
    every = [
        packed(sample(777, torch.bfloat16, seed), torch.zeros(777), block_numel)
        for seed in range(4)
    ]
    want = torch.zeros(777)
    for one in every:
        want += unpacked(one, 777, block_numel)
    out = torch.empty(777, dtype=dtype)
    signs, scales = (torch.stack(tensors) for tensors in zip(*every, strict=True))
    sign_unpack_(signs, scales, out, block_numel, 0.25)
    assert torch.equal(out, (want * 0.25).to(dtype))


def test_a_block_no_kernel_has_is_refused() -> None:
    with pytest.raises((UsageError, RuntimeError), match="block_numel = 100"):
        packed(torch.ones(100), torch.zeros(100), 100)


def test_registered_as_torch_wants_it() -> None:
    value, error, out = sample(70, torch.bfloat16, 3), torch.zeros(70), torch.empty(70)
    pack, unpack = torch.ops.xds.sign_pack_.default, torch.ops.xds.sign_unpack_.default
    for block_numel in (0, 32):
        signs, scales = packed(value, error, block_numel)
        torch.library.opcheck(pack, (value, error, signs, scales, block_numel, True))
        torch.library.opcheck(unpack, (signs[None], scales[None], out, block_numel, 0.5))
