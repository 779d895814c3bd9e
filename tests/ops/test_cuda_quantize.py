"""Tests of the CUDA kernels of block quantisation and packed signs: on the host with g++, and on a GPU.

Every byte is compared with that of the torch reference. On the host all code runs except for hardware
instructions (tests/ops/cuda_on_host). Tests that need a GPU are marked `gpu`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import cuda_on_host
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

OPS = torch.ops.xds
QUANTIZE, DEQUANTIZE = OPS.quantize_.default, OPS.dequantize_.default
PACK, UNPACK = OPS.sign_pack_.default, OPS.sign_unpack_.default

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# less than a byte, lane, block, tile (1,024) and launch's first round (8,192), and more than each
SIZES = [1, 9, 300, 1025, 9001]
BLOCKS = {1: [32], 9: [256], 300: [32, 128, 1024], 1025: [64, 512], 9001: [256, 1024]}

Kernels = cuda_on_host.Host | cuda_on_host.Gpu


@pytest.fixture(scope="module", params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kernels]:
    if request.param == "gpu":
        yield cuda_on_host.gpu("cuda_quantize")
    else:
        yield cuda_on_host.host("quantize", tmp_path_factory.mktemp("kernels"))


def sample(numel: int, dtype: torch.dtype, seed: int, offset: int = 0) -> Tensor:
    """Magnitudes from 1e-3 to 1e3, zeros among them, `offset` elements behind an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(numel + offset, generator=generator)
    flat *= 10 ** torch.empty(numel + offset).uniform_(-3, 3, generator=generator)
    flat[::7] = 0
    return flat.to(dtype)[offset:]


def on(kernels: Kernels, *tensors: Tensor | None) -> list[Tensor | None]:
    """Copies on the device, as far from an aligned address as they were."""
    copies = []
    for tensor in tensors:
        if tensor is None:
            copies.append(None)
            continue
        offset = tensor.storage_offset()
        room = torch.zeros(offset + tensor.numel(), dtype=tensor.dtype, device=kernels.device)
        copies.append(room[offset:].view(tensor.shape).copy_(tensor))
    return copies


def assert_same(ours: Tensor | None, theirs: Tensor | None) -> None:
    if ours is None or theirs is None:
        assert ours is theirs
        return
    ours = ours.cpu()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(nan=0.5), theirs.nan_to_num(nan=0.5))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", SIZES)
def test_quantising_gives_the_references_bytes(kernels: Kernels, numel: int, bits: int) -> None:
    for dtype, block, offset, feeds_back in product(DTYPES, BLOCKS[numel], (0, 1), (False, True)):
        flat = sample(numel, dtype, numel, offset)
        error = sample(numel, torch.float32, 5) if feeds_back else None
        if numel >= 300:
            flat[40], flat[299] = math.nan, -math.inf
        values = torch.full((value_bytes(numel, bits),), 99, dtype=torch.uint8)
        absmax = torch.full((block_count(numel, block),), -1.0)
        ours = on(kernels, flat, values, absmax, error)
        kernels.call(QUANTIZE, *ours, bits, block)
        quantize_reference(flat, values, absmax, error, bits, block)
        for our, their in zip(ours, (flat, values, absmax, error), strict=True):
            assert_same(our, their)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", SIZES)
def test_dequantising_gives_the_references_bytes(kernels: Kernels, numel: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    for dtype, block, offset, parts in product(DTYPES, BLOCKS[numel], (0, 1), (1, 3)):
        shape = (parts, value_bytes(numel, bits))
        values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        absmax = torch.rand(parts, block_count(numel, block), generator=generator)
        out = sample(numel, dtype, 1, offset)
        ours = on(kernels, values, absmax, out)
        kernels.call(DEQUANTIZE, *ours, bits, block, 0.3)
        dequantize_reference(values, absmax, out, bits, block, 0.3)
        assert_same(ours[2], out)


@pytest.mark.parametrize("root_mean_square", [False, True])
@pytest.mark.parametrize("numel", SIZES)
def test_packing_signs_gives_the_references_signs_scales_and_errors(
    kernels: Kernels, numel: int, root_mean_square: bool
) -> None:
    for dtype, block, offset in product(DTYPES, [0, *BLOCKS[numel]], (0, 1)):
        value = sample(numel, dtype, numel, offset)
        error = sample(numel, torch.float32, 5)
        if numel >= 300 and block:
            value[40], value[299] = math.inf, -math.inf
        signs = torch.full((sign_bytes(numel),), 99, dtype=torch.uint8)
        scales = torch.full((scale_count(numel, block),), -1.0)
        ours = on(kernels, value, error, signs, scales)
        gain = 1.0 if root_mean_square else 0.1
        kernels.call(PACK, *ours, block, root_mean_square, gain)
        sign_pack_reference(value, error, signs, scales, block, root_mean_square, gain)
        assert_same(ours[2], signs)
        # sums in float64 in two orders: at most the last bit of the scale differs
        torch.testing.assert_close(ours[3].cpu(), scales, rtol=1.2e-7, atol=0)
        torch.testing.assert_close(ours[1].cpu(), error, rtol=0, atol=2e-7 * 1e4)


@pytest.mark.parametrize("numel", SIZES)
def test_unpacking_signs_gives_the_references_bytes(kernels: Kernels, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    for dtype, block, offset, parts in product(DTYPES, [0, *BLOCKS[numel]], (0, 1), (1, 3)):
        shape = (parts, sign_bytes(numel))
        signs = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.rand(parts, scale_count(numel, block), generator=generator)
        out = sample(numel, dtype, 1, offset)
        ours = on(kernels, signs, scales, out)
        kernels.call(UNPACK, *ours, block, 0.3)
        sign_unpack_reference(signs, scales, out, block, 0.3)
        assert_same(ours[2], out)


def test_launches(kernels: Kernels) -> None:
    flat, error, absmax = torch.ones(64), torch.zeros(64), torch.zeros(2)
    values, signs = torch.zeros(64, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    ours = on(kernels, flat, values, absmax, error)
    assert kernels.launches(lambda: kernels.call(QUANTIZE, *ours, 8, 32)) == 1
    ours = on(kernels, flat, error, signs, absmax)
    assert kernels.launches(lambda: kernels.call(PACK, *ours, 32, False)) == 1
    ours = on(kernels, flat, error, signs, absmax[:1])
    assert kernels.launches(lambda: kernels.call(PACK, *ours, 0, True)) == 3


def test_nothing_to_do_launches_nothing(kernels: Kernels) -> None:
    none, no_bytes = torch.zeros(0), torch.zeros(0, dtype=torch.uint8)
    ours = on(kernels, none, no_bytes, none)
    assert kernels.launches(lambda: kernels.call(QUANTIZE, *ours, None, 8, 32)) == 0
    ours = on(kernels, none, none, no_bytes, none)
    assert kernels.launches(lambda: kernels.call(PACK, *ours, 32, False)) == 0


def test_wrong_arguments_are_named(kernels: Kernels) -> None:
    flat, values, absmax = torch.ones(64), torch.zeros(64, dtype=torch.uint8), torch.zeros(2)
    wrong = [
        ((flat.double(), values, absmax, None, 8, 32), "flat is Double"),
        ((flat, values[:5], absmax, None, 8, 32), "values needs n \\* bits / 8 bytes"),
        ((flat, values, absmax[:1], None, 8, 32), "absmax needs one element a block"),
        ((flat, values, absmax, flat[:3], 8, 32), "error has 3 elements"),
        ((flat, values, absmax, None, 8, 48), "block_numel needs to be 32, 64"),
        ((flat, values, absmax, None, 2, 32), "bits needs to be 8 or 4"),
    ]
    for arguments, message in wrong:
        tensors = on(kernels, *arguments[:4])
        with pytest.raises(RuntimeError, match=message):
            kernels.call(QUANTIZE, *tensors, *arguments[4:])


@pytest.mark.gpu
@pytest.mark.parametrize("block", [0, 1024])
def test_a_gpu_gives_the_same_bytes_twice_and_never_waits(block: int) -> None:
    gpu = cuda_on_host.gpu("cuda_quantize")
    numel = 50_000_003
    value = torch.randn(numel, device=gpu.device)
    runs = []
    for _ in range(2):
        error = torch.zeros_like(value)
        signs = torch.empty(sign_bytes(numel), dtype=torch.uint8, device=gpu.device)
        scales = torch.empty(scale_count(numel, block), device=gpu.device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            PACK(value, error, signs, scales, block, True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        runs.append((error, signs, scales))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
