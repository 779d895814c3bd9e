"""The CUDA runtime for the host finds what a GPU alone would show; indices beyond 2^31; every op at every edge.

`cuda_on_host/runtime.cpp` says what a fault is. Large tensors are memory that exists only where it is used.
Of a grid, the blocks at its ends and where an index of 32 bits would wrap are run.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_under_test import OnHost, build_on_host
from test_kernels import (
    BF16,
    FP16,
    FP32,
    LAMB,
    ROW_NUMEL,
    RULES,
    STATES,
    Operands,
    direction_of,
    op,
    operands,
    reference,
    same,
    tied_signs,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xds.ops.coded import BLOCK_NUMEL, ROW_BYTES, encode, rows_of
from xds.ops.rounding import draw_rows, rows_from

FAULTS = {
    0: "",
    1: "reads shared memory that its block has not written",
    2: "reads shared memory that",
    3: "reads shared memory that",  # a shuffle orders no memory
    4: "thread 31 of block 0 reads shared memory that",  # the neighbour is of another warp
    5: "thread 0 of block 1 writes memory that thread 0 of block 0 wrote",
    6: "thread 40 of block 0 never reaches a shuffle",
    7: "mask",
    8: "a grid of 0 blocks",
    9: "of 48 threads",
}
NUMEL = 2**31 + 2**11 + 5
CODED_NUMEL = 2**31 + 2**11 + 3 * BLOCK_NUMEL  # of states of 8 bits
NORESERVE = 0x4000


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = getattr(request.config, "cache", None)  # none with -p no:cacheprovider
    return Path(cache.mkdir("kernels") if cache else tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def kernels(folder: Path) -> OnHost:
    return OnHost(folder)


def test_what_only_a_gpu_would_show_fails_the_launch(tmp_path: Path) -> None:
    source = Path(__file__).parent / "cuda_on_host" / "faulty.cpp"
    result = ctypes.CDLL(str(build_on_host(source, tmp_path / "faulty.so"))).xds_result
    result.restype = ctypes.c_char_p
    for fault, says in FAULTS.items():
        text = result(fault).decode()
        assert says in text and bool(text) == bool(says), (fault, text)


# -- more than 2^31 elements --------------------------------------------------------------------------------


def sparse(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory where they are used alone."""
    room = mmap.mmap(-1, numel * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(room, dtype=dtype)


def windows(numel: int) -> list[slice]:
    """At the ends, and where an index of 31 bits wraps: of an element, and of a byte of states of 8 bits."""
    of_byte = 2**31 // ROW_BYTES * BLOCK_NUMEL
    starts = (0, of_byte, 2**31 - 2048, 2**31, numel - numel % 2048)
    return [slice(start, min(start + 2048, numel)) for start in starts]


def fill(tensor: Tensor, seed: int, scale: float = 1.0) -> None:
    random = torch.Generator().manual_seed(seed)
    for window in windows(len(tensor)):
        part = tensor[window]
        part.copy_(torch.randn(len(part), generator=random) * scale)


def run_at(kernels: OnHost, block_numel: int, *, first: int = 0) -> None:
    """A grid of one block for each piece of work; those of the windows are run, and the `first` ones."""
    kernels.set_multiprocessors(2**30)
    ends = [end for window in windows(NUMEL) for end in (window.start, window.stop - 1)]
    kernels.run_blocks(sorted({*range(first), *(end // block_numel for end in ends)}))


@pytest.fixture
def huge(kernels: OnHost) -> Any:
    yield kernels
    kernels.run_blocks()
    kernels.set_multiprocessors(3)


SKELETONS = ("adamw", "lion", "momentum")  # of two states and one; others run with the slow tests


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SKELETONS else pytest.mark.slow) for name in RULES],
)
@pytest.mark.slow
def test_a_step_reaches_elements_beyond_two_to_the_31(huge: OnHost, name: str) -> None:
    rule = RULES[name]
    param, grad, out = sparse(NUMEL, FP32), sparse(NUMEL, BF16), sparse(NUMEL, BF16)
    states = [sparse(NUMEL, FP32) for _ in range(rule.states)]
    for seed, tensor in enumerate((param, grad)):
        fill(tensor, seed)
    one = torch.tensor(3.0)
    on = Operands(param, grad, states, out, one, None, None)
    wanted = []
    for window in windows(NUMEL):
        parts = [tensor[window].clone() for tensor in (param, grad, out)]
        part = Operands(
            parts[0],
            parts[1],
            [state[window].clone() for state in states],
            parts[2],
            one,
            None,
            None,
        )
        reference(rule.op, *rule.arguments(part))
        wanted.append(part)
    run_at(huge, 2048)
    huge.call(op(rule.op), *rule.arguments(on))
    for window, part in zip(windows(NUMEL), wanted, strict=True):
        found = [tensor[window] for tensor in on.tensors()]
        same(found[:-1], part.tensors()[:-1], (name, window), 2e-6, 2e-7)
        assert torch.equal(found[-1], found[0].to(BF16)), (name, window)
    assert not param[2**31 - 4096 : 2**31 - 2048].any(), "of a block that has not run"


class Zeros(TorchDispatchMode):
    """Blocks that are not run write no sums."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func._schema.name == "aten::new_empty" else made


def test_sums_reach_elements_beyond_two_to_the_31(huge: OnHost) -> None:
    flat = sparse(NUMEL, BF16)
    fill(flat, 1)
    total = sum(float(flat[window].double().square().sum()) for window in windows(NUMEL))
    stretch = -(-NUMEL // (8192 * 16384)) * 8192
    run_at(huge, stretch)
    with Zeros():
        found = float(huge.call(op("square_sum"), flat))
    assert found == pytest.approx(total, rel=1e-12)


MASTERS = ("halves", "bf16", "fp32")
NARROW = [  # op, masters, whether states have 8 bits; those of 16 bits in one pass are among `RULES` otherwise
    (name, master, has_codes)
    for name, master, has_codes in product(STATES, MASTERS, (False, True))
    if has_codes or master != "fp32"
]
QUICK = [("adam_", "halves", False), ("adam_", "bf16", True)]


def exact_step(run: Any, param: Tensor, low: Tensor | None, more: tuple[Any, ...]) -> None:
    """With constants whose arithmetic has the same bits in every implementation. more: of one step."""
    grad, states, out, draws = more
    count, rounded = torch.tensor(3.0), (draws, low)
    if len(states) == 2:
        constants = (2.0**-12, 0.5, 0.5, 1.0, 0.0, True, False, False, *[None] * 3)
        run(param, grad, *states, out, count, None, None, *constants, *rounded)
    else:
        run(
            param,
            grad,
            *states,
            out,
            None,
            None,
            2.0**-12,
            0.5,
            0.5,
            0.0,
            False,
            None,
            None,
            count,
            *rounded,
        )


def random_states(kinds: list[torch.dtype], numel: int, *, has_codes: bool) -> list[Tensor]:
    """Powers of 2 in the windows."""
    states = []
    for seed, kind in enumerate(kinds):
        if has_codes:
            state = sparse(numel // BLOCK_NUMEL * ROW_BYTES, kind).view(-1, ROW_BYTES)
        else:
            state = sparse(numel, FP32)
        random = torch.Generator().manual_seed(10 + seed)
        for window in windows(numel):
            values = powers(window.stop - window.start, random).abs()
            if has_codes:
                encode(state[rows_of(window.start, window.stop)], values)
            else:
                state[window] = values
        states.append(state)
    return states


def powers(numel: int, random: torch.Generator) -> Tensor:
    sizes = 2.0 ** torch.randint(-4, 4, (numel,), generator=random)
    return sizes * (torch.randint(0, 2, (numel,), generator=random) * 2 - 1)


@pytest.mark.parametrize(
    ("name", "master", "has_codes"),
    [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.slow) for one in NARROW],
)
def test_narrow_masters_and_states_reach_elements_beyond_two_to_the_31(
    huge: OnHost, name: str, master: str, has_codes: bool
) -> None:
    numel = CODED_NUMEL
    param = sparse(numel, FP32 if master == "fp32" else BF16)
    low = sparse(numel, torch.int16) if master == "halves" else None
    grad, out = sparse(numel, BF16), sparse(numel, BF16) if master == "fp32" else None
    states = random_states([torch.int8, torch.uint8][: STATES[name]], numel, has_codes=has_codes)
    fill(param, 0)
    random = torch.Generator().manual_seed(1)
    for window in windows(numel):
        grad[window] = powers(window.stop - window.start, random).to(BF16)
        if low is not None:
            low[window].random_(-(2**15), 2**15, generator=random)
    # a parameter's index wraps as well, in the last window
    runs = [(0, 2**31 - 7, 5, "a"), (2**31 - 7, numel, 2**32 - 2300, "b")]
    draws = draw_rows(runs, 1) if has_codes or master == "bf16" else None
    wanted = []
    for window in windows(numel):
        parts = [None if one is None else one[window].clone() for one in (param, low, out)]
        rows = rows_of(window.start, window.stop) if has_codes else window
        kept = [state[rows].clone() for state in states]
        numbers = None if draws is None else rows_from(draws, window.start)
        more = (grad[window], kept, parts[2], numbers)
        exact_step(partial(reference, name), parts[0], parts[1], more)
        wanted.append([*parts, *kept])
    run_at(huge, 2048)
    exact_step(partial(huge.call, op(name)), param, low, (grad, states, out, draws))
    for window, kept in zip(windows(numel), wanted, strict=True):
        rows = rows_of(window.start, window.stop) if has_codes else window
        found = [None if one is None else one[window] for one in (param, low, out)]
        same([*found, *(state[rows] for state in states)], kept, (name, window))


@pytest.mark.parametrize(
    ("state", "first"), [(FP32, 2**31 - 20_000), pytest.param(BF16, 0, marks=pytest.mark.slow)]
)
def test_lamb_reaches_elements_beyond_two_to_the_31(
    huge: OnHost, state: torch.dtype, first: int
) -> None:
    param, grad, out = sparse(NUMEL, FP32), sparse(NUMEL, BF16), sparse(NUMEL, BF16)
    states, direction = [sparse(NUMEL, state) for _ in range(2)], sparse(NUMEL, FP32)
    for seed, tensor in enumerate((param, grad, states[0])):
        fill(tensor, seed)
    bounds = [first, 2**31 - 100, 2**31 + 100, NUMEL]  # one part is in two rows
    rates = torch.tensor([0.5, 0.25, 0.125])
    one, wanted = torch.tensor(3.0), []
    norms = torch.zeros(3, 2, dtype=torch.float64)
    for window in windows(NUMEL):
        parts = [tensor[window].clone() for tensor in (param, grad, *states, out, direction)]
        part = Operands(*parts[:2], parts[2:4], parts[4], one, None, None)
        here = [min(max(bound - window.start, 0), len(parts[0])) for bound in bounds]
        norms += direction_of(partial(reference, "lamb_direction_"), part, here, parts[5])
        reference("lamb_apply_", parts[0], parts[5], parts[4], torch.tensor(here), rates, None)
        wanted.append([parts[0], *parts[2:4], parts[5]])
    run_at(huge, ROW_NUMEL, first=len(rates))
    on = Operands(param, grad, states, out, one, None, None)
    with Zeros():
        call = partial(huge.call, op("lamb_direction_"))
        found_norms = direction_of(call, on, bounds, direction)
    huge.call(op("lamb_apply_"), param, direction, out, torch.tensor(bounds), rates, None)
    same([found_norms], [norms], "norms", 1e-6)
    for window, kept in zip(windows(NUMEL), wanted, strict=True):
        found = [tensor[window] for tensor in (param, *states, direction)]
        low = state == BF16
        same([found[0], found[3]], [kept[0], kept[3]], window, 2e-6, 2e-6)
        same(found[1:3], kept[1:3], window, 8e-3 if low else 2e-6, 2e-7)
        assert torch.equal(out[window], param[window].to(BF16)), window


@pytest.mark.parametrize(
    ("name", "bits"),
    [("quantize_", 8), pytest.param("quantize_", 4, marks=pytest.mark.slow), ("sign_pack_", 1)],
)
def test_packing_reaches_elements_beyond_two_to_the_31(huge: OnHost, name: str, bits: int) -> None:
    block = 1024
    flat = sparse(NUMEL, BF16)
    fill(flat, 2)
    per_byte = 8 // bits
    packed = sparse(-(-NUMEL // per_byte), torch.uint8)
    numbers, error = sparse(-(-NUMEL // block), FP32), sparse(NUMEL, FP32)
    run_at(huge, 8192)
    if name == "quantize_":
        huge.call(op(name), flat, packed, numbers, error, bits, block)
    else:
        huge.call(op(name), flat, error, packed, numbers, block, False)
    out, back = sparse(NUMEL, BF16), "dequantize_" if name == "quantize_" else "sign_unpack_"
    constants = (bits, block, 1.0) if name == "quantize_" else (block, 1.0)
    huge.call(op(back), packed[None], numbers[None], out, *constants)
    for window in windows(NUMEL):
        start, stop = window.start, window.stop
        part, lost = flat[window], torch.zeros(stop - start)
        codes = torch.zeros(-(-(stop - start) // per_byte), dtype=torch.uint8)
        sizes = torch.zeros(-(-(stop - start) // block))
        if name == "quantize_":
            reference(name, part, codes, sizes, lost, bits, block)
        else:
            reference(name, part, lost, codes, sizes, block, False)
        bytes_here = slice(start // per_byte, start // per_byte + len(codes))
        same([packed[bytes_here]], [codes], (name, window))
        found = [numbers[start // block : start // block + len(sizes)], error[window]]
        same(found, [sizes, lost], (name, window), 1e-6, 2e-6)
        restored = torch.zeros(stop - start, dtype=BF16)
        reference(back, codes[None], found[0][None], restored, *constants)
        same([out[window]], [restored], (back, window))


@pytest.mark.parametrize("keeps_norm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_scale_of_signs_is_of_elements_beyond_two_to_the_31(
    huge: OnHost, keeps_norm: bool
) -> None:
    flat, error = sparse(NUMEL, BF16), sparse(NUMEL, FP32)
    fill(flat, 2), fill(error, 3, 0.5)
    parts = [flat[window].float() + error[window] for window in windows(NUMEL)]
    sizes = [part.double().square() if keeps_norm else part.double().abs() for part in parts]
    mean = sum(float(size.sum()) for size in sizes) / NUMEL
    wanted = 3.0 * (mean**0.5 if keeps_norm else mean)
    packed, scale = sparse(-(-NUMEL // 8), torch.uint8), torch.zeros(1)
    # sums are made by at most 4096 blocks, which stride; other launches have one block for each tile
    huge.set_multiprocessors(2**30)
    ends = [end for window in windows(NUMEL) for end in (window.start, window.stop - 1)]
    tiles = {end // 8192 for end in ends}
    huge.run_blocks(sorted({0, *tiles, *(tile % 4096 for tile in tiles)}))
    with Zeros():
        huge.call(op("sign_pack_"), flat, error, packed, scale, 0, keeps_norm, 3.0)
    assert float(scale) == pytest.approx(wanted, rel=1e-6)
    out = sparse(NUMEL, BF16)
    huge.call(op("sign_unpack_"), packed[None], scale[None], out, 0, 2.0)
    for window, part in zip(windows(NUMEL), parts, strict=True):
        signs = torch.where(part.signbit(), -scale, scale)
        same([error[window]], [part - signs], window, 1e-6)
        same([out[window]], [(2 * signs).to(BF16)], window)


# -- every op, dtype, tail and alignment ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_every_tail_alignment_and_dtype_of_a_step(kernels: OnHost, name: str) -> None:
    rule = RULES[name]
    for grad, state, out in product((FP32, BF16, FP16), (FP32, BF16), (None, FP32, BF16, FP16)):
        for numel, offset in product((*range(1, 10), 1023, 1025, 2053), range(4)):
            for offsets in ((offset,), (offset, 0)):
                on = operands(rule, kernels, numel, (grad, state, out), offsets=offsets)
                expected, fences = on.copy(), on.around()
                kernels.call(op(rule.op), *rule.arguments(on))
                case = (name, grad, state, out, numel, offsets)
                same(on.around(), fences, case)
                tied = tied_signs(expected) if rule.op == "lion_" else slice(0)
                reference(rule.op, *rule.arguments(expected))
                expected.param[tied] = on.param[tied]
                same([on.param], [expected.param], case, 2e-6, 2e-7)
                same(on.states, expected.states, case, 8e-3 if state == BF16 else 2e-6, 2e-7)
                if on.out is not None:
                    assert torch.equal(on.out, on.param.to(on.out.dtype)), case


@pytest.mark.slow
def test_every_tail_alignment_and_dtype_of_lamb_and_sums(kernels: OnHost) -> None:
    for grad, state in product((FP32, BF16, FP16), (FP32, BF16)):
        for numel, offset in product((1, 2, 3, 5, 8191, 8193), range(4)):
            given = operands(LAMB, kernels, numel, (grad, state, None), offsets=(offset,))
            on, expected = given.copy(), given.copy()
            bounds, to = [0, numel // 2, numel], [torch.zeros_like(on.param) for _ in range(2)]
            call = partial(kernels.call, op("lamb_direction_"))
            found = direction_of(call, on, bounds, to[0])
            wanted = direction_of(partial(reference, "lamb_direction_"), expected, bounds, to[1])
            same([found, to[0]], [wanted, to[1]], (grad, state, numel, offset), 2e-6, 2e-6)
            flat = given.grad
            total = float(kernels.call(op("square_sum"), flat))
            assert total == pytest.approx(float(flat.double().square().sum()), rel=1e-12)
