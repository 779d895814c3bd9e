"""Kernels of the CPU and of CUDA: the values of their references for every dtype, length and place of memory.

CUDA kernels run on the host, compiled with g++ (kernels_under_test.py). Tests that need a GPU are marked `gpu`.
"""

from __future__ import annotations

import importlib
import math
import pydoc
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from kernels_under_test import Kernels, OnCpu, OnGpu, OnHost
from torch import Tensor

from xds.ops.coded import BLOCK_NUMEL, decoded, encode, new_codes
from xds.ops.flat import take_edits
from xds.ops.halves import Halves
from xds.ops.kernels.adam import adam_, adam_reference
from xds.ops.kernels.decide import decide_reference
from xds.ops.kernels.quantize import block_count, value_bytes
from xds.ops.kernels.signs import scale_count, sign_bytes
from xds.ops.rounding import draw_rows, drawn, upper_half, write_rounded

LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.99, 1e-8, 0.1
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# of the gradient, the states, and the rounded parameters
DTYPES = [(FP32, FP32, None), (BF16, BF16, BF16), (FP16, FP32, FP16), (FP32, BF16, FP32)]
ROW_NUMEL = 8192  # of rows.cuh
FENCE_NUMEL = 16  # behind every flat tensor, to be left alone


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param("cuda on host", marks=pytest.mark.slow),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if request.param == "cpu":
        return OnCpu()
    if request.param == "gpu":
        return OnGpu()
    cache = getattr(request.config, "cache", None)  # none with -p no:cacheprovider
    return OnHost(cache.mkdir("kernels") if cache else tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def cuda(kernels: Kernels) -> Any:
    if not kernels.is_cuda:
        pytest.skip("the CPU launches nothing")
    return kernels


@pytest.fixture
def cpu(kernels: Kernels) -> Any:
    if kernels.is_cuda:
        pytest.skip("of the CPU alone")
    return kernels


@pytest.fixture
def gpu(kernels: Kernels) -> Any:
    if kernels.device.type != "cuda":
        pytest.skip("of a GPU alone")
    return kernels


def op(name: str) -> Any:
    _module(name)
    return getattr(torch.ops.xds, name).default


def reference(name: str, *arguments: Any) -> Any:
    """What the op does in plain torch."""
    return getattr(_module(name), f"{name.rstrip('_')}_reference")(*arguments)


def _module(name: str) -> Any:
    module = {"l": "lamb", "q": "quantize", "d": "quantize"}.get(name[0], name.rstrip("_"))
    module = "signs" if name.startswith("sign") else module
    module = name.rstrip("_") if name in ("lion_", "decide") else module
    module = "decide" if name == "square_sum" else module
    return importlib.import_module(f"xds.ops.kernels.{module}")


def same(found: Any, wanted: Any, case: object, rtol: float = 0, atol: float = 0) -> None:
    """Tensors of two calls are equal, or near where `rtol` or `atol` says so."""
    for one, other in zip(found, wanted, strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            torch.testing.assert_close(
                one.cpu(), other.cpu(), rtol=rtol, atol=atol, equal_nan=True,
                msg=lambda text, case=case: f"{case}: {text}",
            )  # fmt: skip


# -- optimizers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """An op, its states and its constants in the schema's order."""

    op: str
    states: int
    constants: tuple[Any, ...]
    has_step: bool = True

    def arguments(self, on: Operands) -> tuple[Any, ...]:
        states = on.states or ([None] if self.op == "sgd_" else [])
        step = (on.step,) if self.has_step else ()
        return (
            *(on.param, on.grad, *states, on.out, *step, on.scale, on.found_inf),
            *self.constants,
        )


RULES = {
    "adamw": Rule("adam_", 2, (LR, BETA1, BETA2, EPS, DECAY, True, True)),
    "adam with L2": Rule("adam_", 2, (LR, BETA1, BETA2, EPS, DECAY, False, False)),
    "lion": Rule("lion_", 1, (LR, BETA1, BETA2, DECAY), has_step=False),
    "adagrad": Rule("adagrad_", 1, (LR, 0.1, EPS, DECAY)),
    "sgd": Rule("sgd_", 0, (LR, 0.0, 0.0, DECAY, False)),
    "momentum": Rule("sgd_", 1, (LR, 0.9, 0.1, DECAY, False)),
    "nesterov": Rule("sgd_", 1, (LR, 0.9, 0.0, DECAY, True)),
    "frozen adam": Rule("frozen_adam_", 2, (LR, 0.9, 1.5, EPS, 1e-3, 8e-3, False), has_step=False),
    "of momenta": Rule("frozen_adam_", 2, (LR, 0.9, 1.5, EPS, 1e-3, 8e-3, True), has_step=False),
}


@dataclass
class Operands:
    """The tensors of one call."""

    param: Tensor
    grad: Tensor
    states: list[Tensor]
    out: Tensor | None
    step: Tensor
    scale: Tensor | None
    found_inf: Tensor | None

    def tensors(self) -> list[Tensor]:
        return [self.param, *self.states] + ([] if self.out is None else [self.out])

    def copy(self) -> Operands:
        out = None if self.out is None else self.out.clone()
        states = [state.clone() for state in self.states]
        return replace(
            self, param=self.param.clone(), grad=self.grad.clone(), states=states, out=out
        )

    def around(self) -> list[Tensor]:
        """What lies before and behind the tensors that a step writes."""
        ends = [(one, one.storage_offset()) for one in self.tensors()]
        return [torch.cat([one._base[:at], one._base[at + one.numel() :]]) for one, at in ends]  # type: ignore[index]


def operands(
    rule: Rule,
    kernels: Kernels,
    numel: int,
    dtypes: tuple[Any, ...] = (FP32, FP32, None),
    *,
    offsets: Sequence[int] = (0,),
    skips: float | None = None,
) -> Operands:
    """offsets: how many elements behind an aligned address each tensor begins, again from the first one."""
    random, turns = torch.Generator().manual_seed(numel), iter(tuple(offsets) * 8)
    grad, state, out = dtypes

    def flat(dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        at = next(turns)
        values = torch.randn(at + numel + FENCE_NUMEL, generator=random) * scale
        return values.to(kernels.device, dtype)[at : at + numel]

    return Operands(
        param=flat(FP32),
        grad=flat(grad),
        states=[flat(state, 0.1).square_() for _ in range(rule.states)],
        out=None if out is None else flat(out).zero_(),
        step=torch.tensor(3.0, device=kernels.device),
        scale=torch.tensor(0.5, device=kernels.device),
        found_inf=None if skips is None else torch.tensor(skips, device=kernels.device),
    )


def shapes(kernels: Kernels) -> list[tuple[int, tuple[int, ...]]]:
    """Empty, lone elements, all tensors equally far from alignment, each differently."""
    long = 1_000_003 if kernels.device.type == "cuda" else 12_293
    return [(0, (0,)), (15, (0,)), (3, (3,)), (long, (0,)), (long, (1,)), (long, (1, 0, 3, 2, 1))]


def tied_signs(on: Operands) -> Tensor:
    """Where the sign of Lion's update hangs on the last bit."""
    scale = 1.0 if on.scale is None else on.scale
    blend = BETA1 * on.states[0].double() + (1 - BETA1) * on.grad.double() * scale
    return blend.abs() < 1e-6


def test_a_step_has_the_references_values(kernels: Kernels) -> None:
    for (name, rule), dtypes, (at, shape) in product(
        RULES.items(), DTYPES, enumerate(shapes(kernels))
    ):
        numel, offsets = shape
        on = operands(rule, kernels, numel, dtypes, offsets=offsets)
        on.scale = None if at % 3 == 0 else on.scale
        expected, fences, grad = on.copy(), on.around(), on.grad.clone()
        kernels.call(op(rule.op), *rule.arguments(on))
        case = (name, dtypes, shape)
        same(on.around(), fences, case)
        same([on.grad], [grad], case)
        tied = tied_signs(expected) if rule.op == "lion_" else slice(0)
        reference(rule.op, *rule.arguments(expected))
        expected.param[tied] = on.param[tied]
        same([on.param], [expected.param], case, 2e-6, 2e-7)
        low = dtypes[1] == BF16  # a tie may round either way
        same(on.states, expected.states, case, 8e-3 if low else 2e-6, 2e-7)
        if on.out is not None:
            assert torch.equal(on.out, on.param.to(on.out.dtype)), case


def test_masters_of_16_bits_are_rounded_by_the_number_of_their_element(kernels: Kernels) -> None:
    """With constants whose arithmetic is exact, so that every implementation has the same bits."""
    step = torch.tensor(7.0, device=kernels.device)
    for (numel, offsets), narrow, has_draws in product(
        shapes(kernels)[1:], (BF16, FP16), (True, False)
    ):
        on = operands(RULES["adamw"], kernels, numel, (narrow, BF16, None), offsets=offsets)
        param, (mean, square) = on.param.to(narrow), on.states
        on.grad.mul_(8).round_()
        mean.zero_()
        square.zero_()
        third = numel // 3  # runs of odd lengths, and an index beyond 32 bits
        runs = [
            (0, third, 2**32 - 5, "a"),
            (third, 2 * third, 0, "b"),
            (2 * third + 1, numel, 9, "c"),
        ]
        rows = draw_rows(runs, 1).to(kernels.device) if has_draws else None
        # beta1 = 0, beta2 = 1, eps = 1: p - 2^-12 g, for both kinds of a decay by 0
        decoupled = bool(numel % 2)
        constants = (2.0**-12, 0.0, 1.0, 1.0, 0.0, decoupled, False, False, *[None] * 3, rows)
        call = (on.grad, mean, square, None, step, None, None, *constants)
        wanted = param.clone()
        reference("adam_", wanted, *call)
        changed = (wanted != param).float().mean()
        assert numel < 100 or 0.05 < changed < 0.95, (narrow, has_draws)
        for way in kernels.each():
            tried = param.clone()
            kernels.call(op("adam_"), tried, *call)
            assert torch.equal(tried, wanted), (narrow, has_draws, numel, way)
        # bf16 moments: the second one is rounded by the same numbers
        squares = [square.clone().fill_(1.0) for _ in range(2)]
        runners = partial(reference, "adam_"), partial(kernels.call, op("adam_"))
        for tried, run in zip(squares, runners, strict=True):
            constants = (0.0, 0.0, 1 - 2.0**-10, 1.0, 0.0, *(True, False, False))
            call = (torch.zeros_like(on.grad), mean, tried, None, step, None, None, *constants)
            run(param.clone(), *call, None, None, None, rows)
        assert torch.equal(*squares)
        assert numel < 100 or has_draws == (squares[0].unique().numel() == 2)


def one_step(
    run: Any,
    tensors: tuple[Tensor, Tensor, Sequence[Tensor], Tensor | None],
    count: Tensor,
    more: tuple[Any, ...],
    *,
    takes_edits: bool = False,
) -> None:
    """Of AdamW; of Lion if there is one state. more: draws, the lower halves, how `out` is rounded."""
    param, grad, states, out = tensors
    if len(states) == 2:
        constants = (LR, BETA1, BETA2, EPS, DECAY, True, True)
        given = (*states, out, count, None, None, *constants, takes_edits, *[None] * 3)
    else:
        given = (*states, out, None, None, LR, BETA1, BETA2, DECAY, takes_edits, None, None, count)
    run(param, grad, *given, *more)


def split_steps(run: Any, param: Tensor, grad: Tensor, states: list[Tensor]) -> None:
    """Two steps of masters in halves have the bits of fp32 masters beside parameters that are rounded alike."""
    wide, out = param.clone(), upper_half(param)
    halves = Halves(out.clone(), param.view(torch.int32).to(torch.int16))
    twins = [state.clone() for state in states]
    rows = draw_rows([(0, len(param), 0, "w")], 0).to(param.device)
    draws = None if states[0].dtype == FP32 else rows
    is_written = (torch.arange(len(param), device=param.device) % 5 == 0) & (out != 0.25)
    halves.high[is_written] = out[is_written] = 0.25  # a script's writes
    halves.low[is_written] = 0  # without `out` they would stay
    for step in (1.0, 2.0):
        count = torch.tensor(step, device=param.device)
        one_step(run, (wide, grad, states, out), count, (draws, None, True), takes_edits=True)
        one_step(run, (halves.high, grad, twins, None), count, (draws, halves.low))
        same([halves.high, upper_half(wide)], [out, out], len(param))
        same([halves.joined().view(torch.int32)], [wide.view(torch.int32)], len(param))
        same(twins, states, len(param))


def test_masters_in_halves_have_the_bits_of_whole_ones(kernels: Kernels) -> None:
    for (numel, offsets), (state, grad) in product(shapes(kernels), ((FP32, BF16), (BF16, BF16))):
        on = operands(RULES["adamw"], kernels, numel, (grad, state, None), offsets=offsets)
        bits = on.param.view(torch.int32)
        bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000  # in the middle of two
        on.grad[::6] = 0
        for _, (name, count) in product(kernels.each(), STATES.items()):
            states = [state.clone() for state in on.states[:count]]
            split_steps(partial(kernels.call, op(name)), on.param, on.grad, states)
    param = torch.randn(3 * BLOCK_NUMEL).to(kernels.device)
    for name in STATES:
        for run in (partial(kernels.call, op(name)), partial(reference, name)):
            split_steps(run, param, param.to(BF16), codes_of(name, param))


def test_a_value_in_halves_comes_back() -> None:
    parts = [
        torch.randint(-(2**31), 2**31, (100_000,))
    ]  # of all kinds, and around the ends of them
    parts += [torch.arange(at - 70_000, at + 70_000) for at in (0, 0x7F800000)]
    bits = torch.cat([*parts, *[part - 2**31 for part in parts[1:]]]).to(torch.int32)
    values = bits.view(torch.float32)
    halves = Halves(torch.empty_like(values, dtype=BF16), torch.empty_like(bits, dtype=torch.int16))
    halves.write(values)
    found, nearest = halves.joined(), values.to(BF16)
    is_nan, is_tiny = values.isnan(), (bits & 0x7FFFFFFF) < 0x8000
    assert found[is_nan].isnan().all() and not found[is_tiny].any()
    assert found.signbit()[~is_nan].equal(values.signbit()[~is_nan])
    is_exact = ~(is_nan | is_tiny)
    assert found.view(torch.int32)[is_exact].equal(bits[is_exact])
    differs = halves.high[~is_nan] != nearest[~is_nan]
    is_tie = (bits[~is_nan] & 0x1FFFF) == 0x8000  # below it is even
    assert differs.equal(is_tie) and differs.any()
    halves.high.zero_()  # by a script: whatever the lower halves are
    assert not halves.joined().any()


STATES = {"adam_": 2, "lion_": 1}  # of the ops that round at random


def codes_of(name: str, param: Tensor) -> list[Tensor]:
    kinds = (False, True)[: STATES[name]]
    return [new_codes(len(param), param.device, of_squares=squares) for squares in kinds]


def codes_after(run: Any, param: Tensor, grad: Tensor, draws: Tensor | None) -> list[list[Tensor]]:
    """The moments after each of three steps: the first one sets them, and the others leave them alone."""
    param, found = param.clone(), []
    out = None if param.dtype == BF16 else param.to(BF16)
    codes = [new_codes(len(param), param.device, of_squares=squares) for squares in (False, True)]
    for step, beta in ((1.0, 0.0), (2.0, 1.0), (3.0, 1.0)):
        constants = (0.0, beta, beta, 1.0, 0.0, True, False, out is not None)
        given = grad if step == 1 else torch.zeros_like(grad)
        count = torch.tensor(step, device=param.device)
        run(param, given, *codes, out, count, None, None, *constants, None, None, None, draws)
        found.append([each.clone() for each in codes])
    return found


def test_states_of_8_bits_have_the_bits_of_the_reference(kernels: Kernels) -> None:
    """Moments of any size, by every way and alignment."""
    for rows, offset, narrow, has_draws in product((1, 19), (0, 3), (FP32, BF16), (True, False)):
        numel = rows * BLOCK_NUMEL
        generator = torch.Generator().manual_seed(rows)
        sizes = 2.0 ** torch.randint(-40, 40, (offset + numel,), generator=generator)
        memory = torch.randint(-63, 64, (offset + numel,), generator=generator) * sizes
        memory[offset + 5 : offset + 8] = torch.tensor([math.inf, math.nan, 1e-44])
        memory[-BLOCK_NUMEL // 2 :] = 0
        runs = [(0, numel // 2, 2**32 - 5, "a"), (numel // 2, numel, 1, "b")]
        draws = draw_rows(runs, 1).to(kernels.device) if has_draws else None
        param = torch.randn(numel, generator=generator).to(kernels.device, narrow)
        given = param, memory.to(kernels.device)[offset:], draws
        wanted = codes_after(partial(reference, "adam_"), *given)
        for way in kernels.each():
            for found, codes in zip(
                codes_after(partial(kernels.call, op("adam_")), *given), wanted, strict=True
            ):
                assert all(map(torch.equal, found, codes)), (rows, offset, narrow, has_draws, way)
        assert all(map(torch.equal, wanted[0], wanted[2]))


def after_lion(
    run: Any, param: Tensor, grad: Tensor, state: Tensor, draws: Tensor | None
) -> list[Tensor]:
    """After two exact steps: the first one sets the momentum, and the second one leaves it."""
    param, state = param.clone(), state.clone()
    for step, beta in ((1.0, 0.0), (2.0, 1.0)):
        count = torch.tensor(step, device=param.device)
        constants = (2.0**-12, beta, beta, 0.0, False, None, None, count, draws)
        run(param, grad if step == 1 else grad * 0, state, None, None, None, *constants)
    return [state, param.nan_to_num()]


def test_lion_rounds_masters_and_momentum_as_the_reference(kernels: Kernels) -> None:
    for offset, narrow, kind, has_draws in product(
        (0, 3), (FP32, BF16, FP16), (torch.int8, BF16), (True, False)
    ):
        numel = 19 * BLOCK_NUMEL
        generator = torch.Generator().manual_seed(1)
        memory = torch.randn(offset + numel, generator=generator)
        memory[offset + 7] = 0
        grad = memory.to(kernels.device)[offset:]
        param = torch.randn(numel, generator=generator).to(kernels.device, narrow)
        draws = draw_rows([(0, numel, 7, "w")], 1).to(kernels.device) if has_draws else None
        is_coded = kind == torch.int8
        state = codes_of("lion_", param)[0] if is_coded else torch.zeros_like(param, dtype=kind)
        wanted = after_lion(partial(reference, "lion_"), param, grad, state, draws)
        for way in kernels.each():
            found = after_lion(partial(kernels.call, op("lion_")), param, grad, state, draws)
            assert all(map(torch.equal, found, wanted)), (offset, narrow, kind, has_draws, way)


def test_threads_change_no_bit_of_what_is_rounded_at_random(cpu: Any) -> None:
    numel = 5 << 15  # several times the fewest elements of a thread
    param, grad = torch.randn(numel), torch.randn(numel)
    draws, count = draw_rows([(0, numel - 3, 0, "w")], 1), torch.tensor(1.0)
    before = torch.get_num_threads()
    for (name, number), narrow, is_coded in product(STATES.items(), (FP32, BF16), (True, False)):
        found = []
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            tried = param.to(narrow, copy=True)
            states = [torch.zeros(numel, dtype=BF16) for _ in range(number)]
            states = codes_of(name, param) if is_coded else states
            one_step(op(name), (tried, grad, states, None), count, (draws,))
            found.append([tried, *states])
        torch.set_num_threads(before)
        for others in found[1:]:
            assert all(map(torch.equal, others, found[0])), (name, narrow, is_coded)


def test_a_value_of_8_bits_keeps_its_code_and_has_the_mean_of_what_it_was() -> None:
    tries = 1000
    values = torch.rand(BLOCK_NUMEL).pow(3) * torch.where(torch.rand(BLOCK_NUMEL) < 0.5, -1, 1)
    values[:3] = torch.tensor([1.5, 0.0, 1e-9])
    draws = drawn(draw_rows([(0, tries * BLOCK_NUMEL, 0, "w")], 1), 1, tries * BLOCK_NUMEL)
    for of_squares in (False, True):
        given = values.abs() if of_squares else values
        codes = new_codes(len(draws), torch.device("cpu"), of_squares=of_squares)
        encode(codes, given.repeat(tries), draws)
        for part in (draws.flip(0), None):
            again = torch.zeros_like(codes)
            encode(again, decoded(codes), part)
            assert torch.equal(again, codes)
        mean = decoded(codes).view(tries, BLOCK_NUMEL).double().mean(0)
        is_seen = given.abs() > 2.0**-13
        assert torch.allclose(mean[is_seen], given[is_seen].double(), rtol=0.02)
        assert (mean[1] > 0) == of_squares, "a square is above 0 beside larger ones"


def test_the_expectation_of_a_rounded_value_is_the_value() -> None:
    """Also of values between zero and the smallest one; inf and nan stay."""
    numel = 1 << 16
    rows = draw_rows([(0, numel, 0, "w")], 5)
    for dtype, value in (
        *((BF16, 1 + 2.0**-9), (BF16, -1e-39), (BF16, 3e38), (FP16, 0.3), (FP16, -1e-6)),
        *((FP16, 65510.0), (BF16, math.inf), (FP16, -math.inf), (FP16, 1e6)),
    ):
        found = torch.empty(numel, dtype=dtype)
        write_rounded(found, torch.full((numel,), value), drawn(rows, 3, numel))
        whole = torch.tensor(value).to(dtype).item()
        if math.isinf(whole) and value != 65510.0:
            assert (found == whole).all(), (dtype, value)
        elif value != 65510.0:
            space = (found.double().max() - found.double().min()).item()
            off = abs(found.double().mean().item() - value)
            assert off < 4 * max(space, 1e-300) / numel**0.5, (dtype, value)
        else:
            assert (found == 65504).all()
    found = torch.zeros(3, dtype=BF16)
    write_rounded(found, torch.tensor([math.nan, 0.0, -0.0]), drawn(rows, 3, 3))
    assert found[0].isnan()
    assert found[1:].view(torch.int16).tolist() == [0, -(2**15)]


def test_what_was_written_over_the_rounded_values_is_the_value(kernels: Kernels) -> None:
    """Other values, zeros of both signs, inf and nan; and what is narrower than it was."""
    for (name, rule), out, is_edited in product(RULES.items(), (BF16, FP16), (True, False)):
        for numel, offsets in shapes(kernels)[1:]:
            on = operands(rule, kernels, numel, (BF16, FP32, out), offsets=offsets)
            assert on.out is not None
            on.param[::11] *= 1e-6
            on.out.copy_(on.param)
            for at, value in enumerate((2.5, 0.0, -0.0, math.inf, math.nan, 1e-7)):
                on.out[3 * at :: 29] = value if is_edited else on.out[3 * at :: 29]
            wanted = on.copy()
            assert wanted.out is not None
            take_edits(wanted.param, wanted.out)
            assert is_edited or torch.equal(wanted.param, on.param)
            kernels.call(op(rule.op), *rule.arguments(wanted))
            for way in kernels.each():
                found = on.copy()
                kernels.call(op(rule.op), *rule.arguments(found), True)
                same(found.tensors(), wanted.tensors(), (name, out, numel, way))
    for out in (None, FP32):
        rule = RULES["adamw"]
        on = operands(rule, kernels, 8, (FP32, FP32, out))
        with pytest.raises(
            RuntimeError, match="takes_edits needs an out that is bfloat16 or float"
        ):
            kernels.call(op(rule.op), *rule.arguments(on), True)


def test_a_found_inf_changes_nothing_and_a_zero_does_not_stop(kernels: Kernels) -> None:
    for name, rule in RULES.items():
        for flag in (1.0, math.inf, math.nan, 0.0):
            on = operands(rule, kernels, 1003, (FP16, FP32, FP16), skips=flag)
            before = on.copy()
            kernels.call(op(rule.op), *rule.arguments(on))
            if flag:
                same(on.tensors(), before.tensors(), (name, flag))
            else:
                assert not torch.equal(on.param, before.param), name


def test_a_nan_stays_in_its_element_and_memory_that_was_never_written_is_not_read(
    kernels: Kernels,
) -> None:
    rule = RULES["adamw"]
    on = operands(rule, kernels, 1003)
    on.grad[500] = math.nan
    kernels.call(op(rule.op), *rule.arguments(on))
    assert torch.isnan(on.param).nonzero().flatten().tolist() == [500]
    rule = RULES["momentum"]
    on = operands(rule, kernels, 1003)
    on.states[0].fill_(math.nan)
    on.step.fill_(1)  # the buffer begins with the gradient
    wanted = on.copy()
    kernels.call(op(rule.op), *rule.arguments(on))
    reference(rule.op, *rule.arguments(wanted))
    same(on.tensors(), wanted.tensors(), "the first step", 2e-6, 2e-7)


def test_a_step_is_one_launch_and_cuda_is_asked_once_for_a_kernel_and_a_device(cuda: Any) -> None:
    for name, rule in RULES.items():
        on = operands(rule, cuda, 5003, (BF16, FP32, BF16))
        run = partial(cuda.call, op(rule.op), *rule.arguments(on))
        assert cuda.launches(run) == 1, name
    if isinstance(cuda, OnHost):
        rule, found = RULES["adamw"], []
        for multiprocessors in (11, 13, 11):
            cuda.set_multiprocessors(multiprocessors)
            for grad in (FP32, BF16, FP32):  # kernels of one C++ type
                on = operands(rule, cuda, 100, (grad, FP32, None))
                found.append(cuda.questions(partial(cuda.call, op(rule.op), *rule.arguments(on))))
        assert found == [1, 1, 0] * 2 + [0, 0, 0]


def test_what_does_not_fit_is_refused_in_a_sentence(kernels: Kernels) -> None:
    device = kernels.device
    zeros = partial(torch.zeros, device=device)
    wide, short = zeros(8, dtype=torch.float64), {"param": zeros(5), "grad": zeros(5)}
    states = [zeros(8), zeros(8, dtype=FP16 if device.type == "cpu" else BF16)]
    refused: dict[str, dict[str, Any]] = {
        "grad has": {"grad": zeros(7)},
        "grad (is Double|must be float32)": {"grad": wide},
        "(exp_avg|state) has 8 elements": short,
        "gaps|must be contiguous": {"grad": zeros(16)[::2]},
        "one dtype|exp_avg_sq is": {"states": states},
        "scale is Double|scale must be float32": {"scale": wide[0]},
        "scale has 2 elements": {"scale": zeros(2)},
    }
    rule = RULES["adamw"]
    for said, changed in refused.items():
        with pytest.raises(RuntimeError, match=said):
            on = replace(operands(rule, kernels, 8), **changed)
            kernels.call(op(rule.op), *rule.arguments(on))
    rule = Rule("sgd_", 0, (LR, 0.9, 0.0, 0.0, False))
    if kernels.is_cuda:
        with pytest.raises(RuntimeError, match="momentum needs a momentum_buffer"):
            kernels.call(op(rule.op), *rule.arguments(operands(rule, kernels, 8)))


def test_instruction_sets_threads_and_places_change_no_bit(cpu: Any) -> None:
    """Also of a shard alone, and where the old values are in other memory, as in updates that are undone."""
    for (name, rule), dtypes in product(RULES.items(), (DTYPES[0], DTYPES[1], (BF16, FP32, BF16))):
        given = operands(rule, cpu, 5 * (1 << 15) + 1027, dtypes)
        wanted = given.copy()
        op(rule.op)(*rule.arguments(wanted))
        for way in (*cpu.each(), "two threads"):
            found = given.copy()
            torch.set_num_threads(2 if way == "two threads" else 1)
            op(rule.op)(*rule.arguments(found))
            torch.set_num_threads(1)
            same(found.tensors(), wanted.tensors(), (name, dtypes, way))
        for start, numel in ((0, 15), (1, 1023), (7, 1025)):
            here = slice(start, start + numel)
            part = given.copy()
            part.param, part.grad = part.param[here], part.grad[here]
            part.states = [state[here] for state in part.states]
            part.out = None if part.out is None else part.out[here]
            op(rule.op)(*rule.arguments(part))
            same(part.tensors(), [one[here] for one in wanted.tensors()], (name, dtypes, start))
        if dtypes[2] is None:
            continue
        for skip, way in product((0, 1), cpu.each()):
            inplace = operands(rule, cpu, 13_318, dtypes)
            assert inplace.out is not None
            inplace.out.copy_(inplace.param)[7] = 3.0  # which a script has edited
            old, apart = inplace.copy(), inplace.copy()
            apart.param, *apart.states = (
                torch.full((one.numel() + skip,), math.nan, dtype=one.dtype)[skip:]
                for one in (old.param, *old.states)
            )
            op(rule.op)(*rule.arguments(inplace), True)
            op(rule.op)(*rule.arguments(apart), True, old.param, *old.states)
            same(apart.tensors(), inplace.tensors(), (name, dtypes, skip, way))


def test_a_thousand_steps_of_adam_stay_near_float64(cpu: Any) -> None:
    torch.manual_seed(0)
    param = torch.randn(5000)
    got = [param.clone(), torch.zeros(5000), torch.zeros(5000)]
    want = [param.double(), torch.zeros(5000).double(), torch.zeros(5000).double()]
    rest = (None, None, 1e-3, 0.9, 0.999, 1e-8, 0.01, True, True)
    for step in range(1, 1001):
        grad, count = torch.randn(5000), torch.tensor(float(step))
        torch.ops.xds.adam_(got[0], grad, *got[1:], None, count, *rest)
        adam_reference(want[0], grad.double(), *want[1:], None, count, *rest)
    for one, other in zip(got, want, strict=True):
        assert (one.double() - other).norm() / other.norm() <= 2e-6


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_16_bit_values_are_widened_exactly_and_others_rounded_to_nearest_even(
    cpu: Any, dtype: torch.dtype
) -> None:
    narrow = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = narrow.float()[narrow.isfinite()]
    high = torch.nextafter(finite.to(dtype), torch.tensor(math.inf, dtype=dtype)).float()
    middle = finite / 2 + high / 2
    near = [middle, *(torch.nextafter(middle, torch.tensor(way)) for way in (-math.inf, math.inf))]
    values = torch.cat([*near, torch.tensor([3.4e38, -3.4e38, 65519.9, 65520.0, 1e-45, math.nan])])
    for _ in cpu.each():
        param, out = torch.zeros(narrow.numel()), torch.zeros_like(narrow)
        one = torch.tensor(2.0)
        op("sgd_")(param, narrow, None, out, one, None, None, -1.0, 0.0, 0.0, 0.0, False)
        same([param, out], [narrow.float() + 0.0, narrow + 0.0], dtype)
        param, out = values.clone(), torch.zeros(values.numel(), dtype=dtype)
        bounds, rates = torch.tensor([0, values.numel()]), torch.zeros(1)
        op("lamb_apply_")(param, torch.zeros_like(values), out, bounds, rates, None)
        same([out], [values.to(dtype)], dtype)


# -- sums, decisions and LAMB ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.float64], ids=str)
def test_the_square_sum_is_right_the_same_at_any_address_and_shows_an_overflow(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    if dtype == torch.float64 and not kernels.is_cuda:
        pytest.skip("plain torch sums fp64 on the CPU")
    for numel in (0, 1, 63, 4097, ROW_NUMEL + 1, 100_003):
        values = torch.randn(numel + 3, generator=torch.Generator().manual_seed(numel))
        shifted = values.to(kernels.device, dtype)[3:]
        wanted, seen = float(shifted.double().square().sum()), set()
        for _ in kernels.each():
            for threads in (1, 2):
                torch.set_num_threads(threads)
                total = kernels.call(op("square_sum"), shifted)
                seen |= {float(total), float(kernels.call(op("square_sum"), shifted.clone()))}
                torch.set_num_threads(1)
        assert total.dtype == torch.float64 and total.shape == () and len(seen) == 1, numel
        assert seen.pop() == pytest.approx(wanted, rel=1e-13 if kernels.is_cuda else 1e-7)
        assert float(reference("square_sum", shifted)) == pytest.approx(wanted, rel=1e-6)
    for bad, at in product((math.inf, -math.inf, math.nan), (0, 12_345, 19_999)):
        flat = torch.ones(20_000, device=kernels.device, dtype=dtype)
        flat[at] = bad
        assert not math.isfinite(float(kernels.call(op("square_sum"), flat)))
    big = torch.full((5,), 1e30, device=kernels.device)  # its square is no fp32 number
    assert float(kernels.call(op("square_sum"), big)) == pytest.approx(5e60, rel=1e-6)


def test_a_decision_has_the_numbers_of_the_host_in_one_launch(cuda: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    for ranks, limit, bad in product(
        (1, 3, 1000), (0.0, 0.5, 1e9), (None, math.inf, math.nan, 0.0, "says", "mixed", "weights")
    ):
        table = torch.rand(ranks, 4, generator=draw, dtype=torch.float64)
        table[:, 1], table[:, 2] = 0, -1
        if bad == "says":
            table[-1, 1] = 2
        elif bad == "mixed":
            table[0, 2], bad = 1, bad if ranks > 1 else None
        elif bad == "weights":
            table[:, 2], bad = torch.rand(ranks, generator=draw), None
        elif bad is not None:
            table[:, 0] = bad
        arguments = (table.to(cuda.device), 1e-20, 0.25, limit)
        found = cuda.call(op("decide"), *arguments).cpu()
        wanted = decide_reference(table, *arguments[1:])
        assert torch.equal(found[2:], wanted[2:]) and bool(found[3]) is (bad is None)
        assert bad is not None or torch.equal(found, wanted)
    assert cuda.launches(lambda: cuda.call(op("decide"), *arguments)) == 1


LAMB = Rule("lamb_direction_", 2, ())
NUMEL = 20_003
CUTS = {  # ways to cut [0, NUMEL) into parts, or some of it
    "one": [0, NUMEL],
    "none": [0],
    "rows": list(range(0, NUMEL + 1, ROW_NUMEL)),
    "small": [0, *range(3, 9000, 37)],
    "mixed": [0, 5, 5, 900, 9000, NUMEL - 3, NUMEL],
    "margins": [7, 7, 5000, ROW_NUMEL, ROW_NUMEL, 2 * ROW_NUMEL + 5, NUMEL - 3, NUMEL - 3],
}


def direction_of(call: Any, on: Operands, bounds: Sequence[int], to: Tensor) -> Tensor:
    norms = torch.full((len(bounds) - 1, 2), -1.0, dtype=torch.float64, device=to.device)
    parts = torch.tensor(bounds, device=to.device)
    rest = (on.step, on.scale, on.found_inf, BETA1, BETA2, EPS, DECAY, True)
    call(on.param, on.grad, *on.states, to, norms, parts, *rest)
    return norms


def test_lamb_has_the_references_directions_norms_and_steps(kernels: Kernels) -> None:
    ops = [partial(kernels.call, op(name)) for name in ("lamb_direction_", "lamb_apply_")]
    plain = [partial(reference, name) for name in ("lamb_direction_", "lamb_apply_")]
    kinds = list(zip(DTYPES, ((0,), (0, 1, 2), (1,), (0,)), strict=True))
    for at, ((cut, bounds), more) in enumerate(product(CUTS.items(), (0, 1))):
        dtypes, offsets = kinds[(at // 2 + 2 * more) % 4]
        given = operands(LAMB, kernels, NUMEL, dtypes, offsets=offsets)
        rates = torch.rand(len(bounds) - 1, generator=torch.Generator().manual_seed(1)) * LR
        results = []
        for _ in ("the reference", *kernels.each()):
            on, (direct, apply) = given.copy(), ops if results else plain
            # in the gradient's memory, where that is fp32
            to = on.grad if on.grad.dtype == FP32 else torch.zeros_like(on.param)
            norms = direction_of(direct, on, bounds, to)
            parts = torch.tensor(bounds, device=to.device)
            apply(on.param, to, on.out, parts, rates.to(to.device), None)
            results.append([to, norms, on.param, *on.states])
            if on.out is not None:
                assert torch.equal(on.out, on.param.to(on.out.dtype)), (cut, dtypes)
        low = dtypes[1] == BF16
        same(results[1][:3], results[0][:3], (cut, dtypes), 2e-6, 2e-6)
        same(results[1][3:], results[0][3:], (cut, dtypes), 8e-3 if low else 2e-6, 2e-7)
        for other in results[2:]:
            same(other, results[1], (cut, dtypes))


def test_lamb_changes_nothing_where_an_inf_was_found(kernels: Kernels) -> None:
    on = operands(LAMB, kernels, 9000, (FP32, FP32, FP32), skips=1.0)
    before, direct = on.copy(), partial(kernels.call, op("lamb_direction_"))
    assert (direction_of(direct, on, [0, 10, 9000], torch.zeros_like(on.param)) == -1.0).all()
    bounds, rates = torch.tensor([0, 9000], device=kernels.device), torch.ones(1).to(kernels.device)
    kernels.call(op("lamb_apply_"), on.param, on.grad, on.out, bounds, rates, on.found_inf)
    same(on.tensors(), before.tensors(), "an inf")


def test_norms_depend_on_the_bounds_alone_and_take_two_launches(cuda: Any) -> None:
    found, direct = [], partial(cuda.call, op("lamb_direction_"))
    for offsets, multiprocessors in product(((0,), (1,), (0, 1, 2, 3)), (1, 3, 7)):
        on = operands(LAMB, cuda, NUMEL, offsets=offsets)
        for tensor in (on.param, on.grad, *on.states):
            tensor.copy_(torch.arange(NUMEL, device=cuda.device) % 1009 / 1009)
        if isinstance(cuda, OnHost):
            cuda.set_multiprocessors(multiprocessors)
        found.append(direction_of(direct, on, CUTS["mixed"], torch.zeros_like(on.param)))
    assert all(torch.equal(norms, found[0]) for norms in found)
    to = torch.zeros_like(on.param)
    assert cuda.launches(lambda: direction_of(direct, on, [0, 9, NUMEL], to)) == 2
    assert cuda.launches(lambda: cuda.call(op("square_sum"), on.grad)) == 2


# -- integers and signs ---------------------------------------------------------------------------------

# less than a byte, lane, block, tile (1,024) and launch's first round (8,192), and more than each
SIZES = {0: [32], 1: [32], 9: [256], 300: [32, 1024], 1025: [64, 512], 9001: [256, 1024]}


def sample(numel: int, dtype: torch.dtype, seed: int, offset: int = 0) -> Tensor:
    """Magnitudes from 1e-2 to 1e2, zeros of both signs, `offset` elements behind an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(numel + offset, generator=generator)
    flat *= 10 ** torch.empty(numel + offset).uniform_(-2, 2, generator=generator)
    flat[::7], flat[3::17] = 0, -0.0
    return flat.to(dtype)[offset:]


def there(kernels: Kernels, *tensors: Any) -> list[Any]:
    """Copies on the device, as far from an aligned address as they were; what is no tensor as it is."""
    copies: list[Any] = []
    for one in tensors:
        if isinstance(one, Tensor):
            offset = one.storage_offset()
            room = torch.zeros(offset + one.numel(), dtype=one.dtype, device=kernels.device)
            one = room[offset:].view(one.shape).copy_(one)
        copies.append(one)
    return copies


def packings() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls of the four ops, with some inf and nan."""
    dtypes = ((FP32, 0), (BF16, 1), (FP16, 0))
    each = (
        (size, dtypes[(at + more) % 3]) for at, size in enumerate(SIZES.items()) for more in (0, 1)
    )
    for (numel, blocks), (dtype, offset) in each:
        for block, (bits, feeds) in product(blocks, ((8, False), (8, True), (4, True))):
            flat = sample(numel, dtype, numel, offset)
            if numel >= 300:
                flat[40], flat[299] = math.nan, -math.inf
            error = sample(numel, FP32, 5) if feeds else None
            values = torch.full((value_bytes(numel, bits),), 99, dtype=torch.uint8)
            absmax = torch.full((block_count(numel, block),), -1.0)
            yield "quantize_", (flat, values, absmax, error, bits, block)
            parts, draw = 3 if feeds else 1, torch.Generator().manual_seed(numel)
            values = torch.randint(0, 256, (parts, len(values)), generator=draw).to(torch.uint8)
            absmax = torch.rand(parts, len(absmax), generator=draw)
            yield "dequantize_", (values, absmax, sample(numel, dtype, 1, offset), bits, block, 0.3)
        for block, rms in product((0, *blocks), (False, True)):
            value = sample(numel, dtype, numel, offset)
            if numel >= 300 and block:
                value[40], value[299] = math.inf, -math.inf
            signs = torch.full((sign_bytes(numel),), 99, dtype=torch.uint8)
            scales = torch.full((scale_count(numel, block),), -1.0)
            error = sample(numel, FP32, 5)
            yield "sign_pack_", (value, error, signs, scales, block, rms, 1.0 if rms else 0.1)
            parts, draw = 3 if rms else 1, torch.Generator().manual_seed(numel)
            signs = torch.randint(0, 256, (parts, len(signs)), generator=draw).to(torch.uint8)
            scales = torch.rand(parts, len(scales), generator=draw)
            yield "sign_unpack_", (signs, scales, sample(numel, dtype, 1, offset), block, 0.3)


def test_packing_and_unpacking_have_the_references_bytes(kernels: Kernels) -> None:
    for name, given in packings():
        wanted = there(kernels, *given) if kernels.is_cuda else [*map(_copied, given)]
        wanted = [one.cpu() if isinstance(one, Tensor) else one for one in wanted]
        reference(name, *wanted)
        first: list[Any] | None = None
        for way in kernels.each():
            found = there(kernels, *given)
            kernels.call(op(name), *found)
            case = (name, *(one for one in given if not isinstance(one, Tensor)), way)
            if name == "sign_pack_":  # sums in float64 in two orders: the last bit of a scale
                same([found[2]], [wanted[2]], case)
                same([found[1], found[3]], [wanted[1], wanted[3]], case, 1e-6, 2e-5)
            else:
                same(found, wanted, case)
            same(found, first or found, case)
            first = found


def _copied(one: Any) -> Any:
    return one.clone() if isinstance(one, Tensor) else one


def test_launches_and_refusals_of_packing(kernels: Kernels) -> None:
    flat, error, absmax = torch.ones(64), torch.zeros(64), torch.zeros(2)
    values, signs = torch.zeros(64, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    wrong = {
        "flat (is Double|must be)": (flat.double(), values, absmax, None, 8, 32),
        "values": (flat, values[:5], absmax, None, 8, 32),
        "absmax": (flat, values, absmax[:1], None, 8, 32),
        "error (has 3|must)": (flat, values, absmax, flat[:3], 8, 32),
        "block_numel": (flat, values, absmax, None, 8, 48),
        "bits": (flat, values, absmax, None, 2, 32),
    }
    for said, arguments in wrong.items():
        with pytest.raises(RuntimeError, match=said):
            kernels.call(op("quantize_"), *there(kernels, *arguments))
    if not kernels.is_cuda:
        return
    none, no_bytes = torch.zeros(0), torch.zeros(0, dtype=torch.uint8)
    for name, arguments, number in (
        ("quantize_", (flat, values, absmax, error, 8, 32), 1),
        ("sign_pack_", (flat, error, signs, absmax, 32, False), 1),
        ("sign_pack_", (flat, error, signs, absmax[:1], 0, True), 3),
        ("quantize_", (none, no_bytes, none, None, 8, 32), 0),
        ("sign_pack_", (none, none, no_bytes, none, 32, False), 0),
    ):
        ours = there(kernels, *arguments)
        run = partial(kernels.call, op(name), *ours)
        assert kernels.launches(run) == number, name  # type: ignore[attr-defined]


# -- how ops look to torch and to a caller --------------------------------------------------------------


def test_torch_sees_ops_as_it_should(cpu: Any) -> None:
    tests = ("test_schema", "test_faketensor")
    calls = {
        rule.op: rule.arguments(operands(rule, cpu, 100, DTYPES[1])) for _, rule in RULES.items()
    }
    for name, given in (calls | dict(packings())).items():
        torch.library.opcheck(op(name), given, test_utils=tests)


def test_an_op_has_the_signature_of_its_reference_and_named_arguments(cpu: Any) -> None:
    text = pydoc.render_doc(adam_, renderer=pydoc.plaintext)
    # Python 3.14 gives each argument a line, and names types without quotes
    assert re.search(r"adam_\(\s*param: ", text)
    assert re.search(r"takes_edits: '?bool'? = False", text)
    assert "One step." in text and "the master weights" in text
    for dtype in (FP32, torch.float64):
        param, grad, mean, square = (torch.ones(3, dtype=dtype) for _ in range(4))
        numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
        tensors = {"out": None, "step": torch.ones(()), "scale": None, "found_inf": None}
        flags = {"decoupled": True, "bias_correction": False}
        adam_(param, grad, mean, square, **tensors, **numbers, **flags)
        assert torch.allclose(param, torch.full_like(param, 0.9))


def test_an_unknown_instruction_set_is_refused(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDS_CPU_ISA", "sse9")
    with pytest.raises(RuntimeError, match='XDS_CPU_ISA = "sse9".*unset it'):
        torch.ops.xds.square_sum(torch.ones(1))


# -- what a GPU alone shows -----------------------------------------------------------------------------


@pytest.mark.gpu
def test_no_step_waits_for_the_device(gpu: Any) -> None:
    for name, rule in RULES.items():
        on = operands(rule, gpu, 100_003, (BF16, FP32, BF16), skips=0.0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            gpu.call(op(rule.op), *rule.arguments(on))
            gpu.call(op("square_sum"), on.grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert on.param.isfinite().all(), name


@pytest.mark.gpu
def test_steps_are_captured_in_a_graph_and_run_on_the_current_stream(gpu: Any) -> None:
    """A capture fails on a wait, and on a launch to any other stream."""
    rule = RULES["adamw"]
    on = operands(rule, gpu, 100_003, (BF16, FP32, BF16))
    expected = on.copy()
    gpu.call(op(rule.op), *rule.arguments(on.copy()))  # loads the kernels, which a capture may not
    gpu.call(op("square_sum"), on.grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.call(op(rule.op), *rule.arguments(on))
        total = gpu.call(op("square_sum"), on.grad)
    graph.replay()
    reference(rule.op, *rule.arguments(expected))
    torch.testing.assert_close(on.param, expected.param, rtol=2e-6, atol=2e-7)
    assert float(total) == pytest.approx(float(on.grad.double().square().sum()), rel=1e-12)


@pytest.mark.gpu
def test_elements_beyond_two_to_the_32_are_reached(gpu: Any) -> None:
    numel = 2**32 + 5
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free GPU memory")
    flat = torch.ones(numel, dtype=BF16, device=gpu.device)
    assert float(gpu.call(op("square_sum"), flat)) == numel
    param, rule = torch.zeros(numel, device=gpu.device), RULES["lion"]
    state = torch.zeros(numel, dtype=BF16, device=gpu.device)
    on = Operands(param, flat, [state], None, torch.ones((), device=gpu.device), None, None)
    gpu.call(op(rule.op), *rule.arguments(on))
    assert bool((param == -torch.tensor(LR, device=gpu.device)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("block", [0, 1024])
def test_a_gpu_packs_the_same_bytes_twice_and_never_waits(gpu: Any, block: int) -> None:
    numel, runs = 50_000_003, []
    value = torch.randn(numel, device=gpu.device)
    for _ in range(2):
        error = torch.zeros_like(value)
        signs = torch.empty(sign_bytes(numel), dtype=torch.uint8, device=gpu.device)
        scales = torch.empty(scale_count(numel, block), device=gpu.device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            op("sign_pack_")(value, error, signs, scales, block, True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        runs.append((error, signs, scales))
    same(*runs, "the second run")
