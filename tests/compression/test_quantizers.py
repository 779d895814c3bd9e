"""Quantizers and masks against their formulas, and the schedule of bits against the rule run step by step."""

from __future__ import annotations

import math

import pytest
import torch

from xds.compression.training.quantizers import learned_mask, noise_like, quantized, top_mask
from xds.compression.training.schedule import Falling

GROUPS = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(dtype: torch.dtype) -> torch.Tensor:
    """10^6 values."""
    return (torch.randn(1000, 1000, generator=torch.Generator().manual_seed(1)) * 0.05).to(dtype)


def by_formula(x, bits, symmetric, noise=0.0):
    """The formulas as the documentation has them, group by group, without guards."""
    if x.dtype == torch.float16:
        return by_formula(x.float(), bits, symmetric, noise).half()
    found = torch.empty_like(x).view(GROUPS, -1)
    noise = noise.view(GROUPS, -1) if torch.is_tensor(noise) else [noise] * GROUPS
    for number, row in enumerate(x.view(GROUPS, -1)):
        mean = row.norm(p=1) / row.numel()
        if bits == 1:
            found[number] = torch.sign(row) * mean
        elif bits == 2:
            large = row.abs() > 0.7 * mean
            size = (row * large).abs().sum() / large.to(x.dtype).sum()
            found[number] = torch.where(large, torch.sign(row) * size, torch.zeros_like(row))
        elif symmetric:
            scale = 2 * row.abs().max() / 2**bits
            steps = (row / scale + noise[number]).round()
            found[number] = steps.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale
        else:
            scale = (row.max() - row.min()) / 2**bits
            zero = (row.min() / scale).round() * scale
            steps = ((row - zero) / scale + noise[number]).round()
            found[number] = steps.clamp(0, 2**bits - 1) * scale + zero
    return found.view(x.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_mode_has_the_bits_of_its_formula(dtype):
    x = values(dtype)
    for bits in (1, 2, 3, 4, 8, 12):
        for symmetric in (True, False)[: 1 + (bits > 2)]:
            got = quantized(x, bits, groups=GROUPS, is_symmetric=symmetric)
            assert torch.equal(got, by_formula(x, bits, symmetric)), (bits, symmetric)
    noise = noise_like(x, torch.tensor(7))
    for symmetric in (True, False):
        got = quantized(x, 4, groups=GROUPS, is_symmetric=symmetric, noise=noise)
        assert torch.equal(got, by_formula(x, 4, symmetric, noise))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_without_a_scale_and_16_bits_are_no_nan(dtype):
    tiny = torch.finfo(dtype).tiny
    for row in ([0.0] * 8, [3.0] * 8, [tiny] * 4 + [-tiny] * 4, [0.01, -0.01] * 4):
        x = torch.tensor([row], dtype=dtype)
        for bits in (1, 2, 4, 16):
            for symmetric in (True, False)[: 1 + (bits > 2)]:
                found = quantized(x, bits, is_symmetric=symmetric)
                assert found.isfinite().all(), (row, bits, symmetric)
    zero = torch.zeros(4, 4, dtype=dtype)
    assert torch.equal(quantized(zero, 8, groups=4), zero)


def test_fp16_has_no_small_scales_and_no_large_sums():
    x = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(1))
    for size in (1e-3, 1.0, 1e4):
        values = (x * size).half()
        for bits, error in ((1, 0.7), (2, 0.5), (8, 0.02), (16, 1e-3)):
            for symmetric in (True, False)[: 1 + (bits > 2)]:
                off = quantized(values, bits, is_symmetric=symmetric).float() - values.float()
                assert off.norm() < error * values.float().norm(), (size, bits, symmetric)
    bounds = (torch.tensor(-6e4), torch.tensor(6e4))
    for symmetric in (True, False):
        found = quantized(values, 8, is_symmetric=symmetric, bounds=bounds)
        assert (found - values).abs().max() <= 300, symmetric
    empty = torch.empty(0, 8, requires_grad=True)
    assert quantized(empty, 8, groups=0).shape == (0, 8)


def test_gradients_pass_unchanged_also_outside_of_the_range():
    x = torch.tensor([[-5.0, 0.0, 0.3, 9.0]], requires_grad=True)
    bounds = (torch.tensor(-1.0), torch.tensor(1.0))
    for found in (quantized(x, 4), quantized(x, 2), quantized(x, 4, bounds=bounds)):
        (grad,) = torch.autograd.grad(found, x, torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        assert grad.tolist() == [[1.0, 2.0, 3.0, 4.0]]
    assert quantized(x, 4, bounds=bounds).max() == 0.875  # 7 of -8 to 7 steps


def test_noise_is_uniform_and_rounds_to_the_value_in_the_mean():
    seeds = [noise_like(torch.zeros(1000, 1000), torch.tensor(s)) for s in (0, 1)]
    for noise in seeds:
        assert noise.min() >= -0.5 and noise.max() < 0.5 and abs(noise.mean()) < 2e-3
        assert abs(noise.var() - 1 / 12) < 1e-3
    assert abs((seeds[0] * seeds[1]).mean()) < 1e-3
    x = torch.full((1, 100_000), 0.3)
    x[0, 0] = 4.0
    found = quantized(x, 4, noise=noise_like(x, torch.tensor(5)))
    assert set(found[0, 1:].tolist()) == {0.0, 0.5} and abs(found[0, 1:].mean() - 0.3) < 5e-3


def test_masks_keep_the_largest_and_the_first_of_equal_ones():
    for count in (1, 3, 10, 101):
        for ratio in (0.01, 0.1, 0.29, 0.5, 1.0):
            mask = top_mask(torch.randn(count), ratio)
            assert mask.sum() == math.ceil(ratio * count)
    assert top_mask(torch.tensor([[1.0, 3.0], [1.0, 2.0]]), 0.75).tolist() == [
        [True, True],
        [False, True],
    ]
    scores = torch.tensor([1.0, 3.0, 2.0], requires_grad=True)
    (learned_mask(scores, 0.5) * torch.tensor([5.0, 6.0, 7.0])).sum().backward()
    assert scores.grad.tolist() == [5.0, 6.0, 7.0]


@pytest.mark.parametrize(
    ("start", "target", "period", "change"),
    [(16, 8, 40, 0.0), (12, 4, 5, 0.01), (8, 8, 0, 0.0), (8, 4, 0, 0.1), (12, 4, 1, 0.25)],
)
def test_bits_fall_as_the_rule_says_step_by_step(start, target, period, change):
    bits, limit, share = start, period, 1.0
    for step in range(1, 1500):
        share = share - change if share > 0 else 0.0
        if bits > target and step >= limit:
            bits, limit, share = bits - 1, 2 * limit, 1.0
        expected = (bits, max(share, 0.0) if change else 0.0)
        assert Falling(start, target, period, change).at(step) == expected, step
