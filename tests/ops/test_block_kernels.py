"""The CPU kernels that pack elements: the values of their references, with every instruction set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from xds.ops.kernels.quantize import (
    block_count,
    dequantize_reference,
    quantize_reference,
    value_bytes,
)
from xds.ops.kernels.signs import (
    scale_count,
    sign_bytes,
    sign_pack_reference,
    sign_unpack_reference,
)
from xds.ops.libraries import load

SIZES = (0, 1, 7, 8, 31, 33, 1023, 1024, 1025, 5001, 70_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
OPS: Any = torch.ops.xds


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    load("cpu", require=True)


def values_of(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Magnitudes from 1e-2 to 1e2, zeros of both signs, a block of zeros, and inf and nan in later blocks."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(numel, generator=generator)
    flat *= 10 ** torch.empty(numel).uniform_(-2, 2, generator=generator)
    flat[3::17], flat[4::17] = 0.0, -0.0
    flat[:64] = 0
    flat[3000:3001] = float("inf")
    flat[4500:4501] = float("nan")
    return flat.to(dtype)


def each_set(monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """The result of `run`, the same with every instruction set of this processor."""
    found: list[Tensor] | None = None
    for name in INSTRUCTION_SETS:
        monkeypatch.setenv("XDS_CPU_ISA", name)
        try:
            now = run()
        except RuntimeError as error:
            assert "this processor runs" in str(error)
            continue
        if found is not None:
            for one, other in zip(now, found, strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
        found = now
    assert found is not None
    return found


def packed(pack: Callable[..., Any], numel: int, dtype: torch.dtype, block: int, rms: bool) -> Any:
    error = values_of(numel, torch.float32, 2).nan_to_num_(0, 0, 0)
    signs = torch.full((sign_bytes(numel),), 99, dtype=torch.uint8)
    scales = torch.full((scale_count(numel, block),), -1.0)
    gain = 1.0 if rms else 0.1
    pack(values_of(numel, dtype, 1), error, signs, scales, block, rms, gain)
    return [signs, scales, error]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [0, 32, 256, 1024])
def test_signs(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: int) -> None:
    for numel in SIZES:
        for rms in (False, True):
            got = each_set(monkeypatch, partial(packed, OPS.sign_pack_, numel, dtype, block, rms))
            want = packed(sign_pack_reference, numel, dtype, block, rms)
            assert torch.equal(got[0], want[0])
            for one, other in zip(got[1:], want[1:], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5, equal_nan=True)


def unpacked(
    unpack: Callable[..., Any], numel: int, dtype: torch.dtype, block: int, parts: int
) -> Any:
    generator = torch.Generator().manual_seed(3)
    shape = (parts, sign_bytes(numel))
    signs = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    scales = torch.rand((parts, scale_count(numel, block)), generator=generator)
    out = torch.full((numel,), 77.0, dtype=dtype)
    unpack(signs, scales, out, block, 1 / 3)
    return [out]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [0, 32, 1024])
def test_sums_of_signs(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: int) -> None:
    for numel in SIZES:
        for parts in (1, 3):
            run = partial(unpacked, OPS.sign_unpack_, numel, dtype, block, parts)
            got = each_set(monkeypatch, run)
            want = unpacked(sign_unpack_reference, numel, dtype, block, parts)
            assert torch.equal(got[0], want[0])


def quantized(
    quantize: Callable[..., Any], numel: int, dtype: torch.dtype, bits: int, block: int, feeds: bool
) -> Any:
    error = values_of(numel, torch.float32, 2).nan_to_num_(0, 0, 0)
    values = torch.full((value_bytes(numel, bits),), 99, dtype=torch.uint8)
    absmax = torch.full((block_count(numel, block),), -1.0)
    own = error if feeds else None
    quantize(values_of(numel, dtype, 1), values, absmax, own, bits, block)
    return [values, absmax, error]


def dequantized(
    dequantize: Callable[..., Any], given: list[Tensor], dtype: torch.dtype, bits: int, block: int
) -> Any:
    out = torch.full_like(given[2], 77.0, dtype=dtype)
    both = torch.stack([given[0], given[0].flip(0)])
    dequantize(both, torch.stack([given[1], given[1] * 0.5]), out, bits, block, 0.5)
    return [out]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", [32, 256, 1024])
@pytest.mark.parametrize("feeds", [False, True])
def test_integers(monkeypatch: pytest.MonkeyPatch, bits: int, block: int, feeds: bool) -> None:
    for numel in SIZES:
        for dtype in DTYPES:
            case = (numel, dtype, bits, block, feeds)
            got = each_set(monkeypatch, partial(quantized, OPS.quantize_, *case))
            want = quantized(quantize_reference, *case)
            assert torch.equal(got[0], want[0])
            run = partial(dequantized, OPS.dequantize_, got, dtype, bits, block)
            got += each_set(monkeypatch, run)
            want += dequantized(dequantize_reference, got, dtype, bits, block)
            for one, other in zip(got[1:], want[1:], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_wrong_arguments_are_refused() -> None:
    value, error = torch.zeros(64), torch.zeros(64)
    signs, scales = torch.zeros(8, dtype=torch.uint8), torch.zeros(1)
    with pytest.raises(RuntimeError, match="block_numel = 48"):
        OPS.sign_pack_(value, error, signs, scales, 48, False)
    with pytest.raises(RuntimeError, match="signs"):
        OPS.sign_pack_(value, error, signs[:4], scales, 64, False)
    with pytest.raises(RuntimeError, match="error must be float32"):
        OPS.sign_pack_(value, error.half(), signs, scales, 64, False)
