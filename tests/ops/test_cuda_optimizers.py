"""Tests of the CUDA kernels of the optimizers and of square_sum: on the host with g++, and on a GPU.

On the host all of their code runs except for hardware instructions (tests/ops/cuda_on_host): arithmetic,
indices, barriers, argument checks. Tests that need a GPU are marked `gpu`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import cuda_on_host
import numpy as np
import pytest
import torch
from torch import Tensor

from xds.ops.kernels.decide import decide_reference
from xds.ops.optim.edits import take_edits

LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.1
LR_DECAY, MOMENTUM, DAMPENING = 0.01, 0.9, 0.1
GRAD_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STATE_DTYPES = [torch.float32, torch.bfloat16]
OUT_DTYPES = [None, torch.bfloat16, torch.float16, torch.float32]
ROW_NUMEL = 8192  # of rows.cuh
FENCE_NUMEL = 16  # behind every flat tensor, to be left alone

Kernels = cuda_on_host.Host | cuda_on_host.Gpu
Array = Any  # numpy's, float64


@pytest.fixture(scope="module", params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kernels]:
    if request.param == "gpu":
        yield cuda_on_host.gpu("cuda_optimizers")
    else:
        yield cuda_on_host.host("optimizers", tmp_path_factory.mktemp("kernels"))


# ---------------------------------------------------------------------------------------- the plain formulas


def adam(
    t: int, g: Array, p: Array, s: list[Array], decoupled: bool = True, corrects: bool = True
) -> Array:
    p, g = (p * (1 - LR * DECAY), g) if decoupled else (p, g + DECAY * p)
    s[0] = BETA1 * s[0] + (1 - BETA1) * g
    s[1] = BETA2 * s[1] + (1 - BETA2) * g * g
    first, second = (1 - BETA1**t, 1 - BETA2**t) if corrects else (1.0, 1.0)
    return p - LR * (s[0] / first) / (np.sqrt(s[1] / second) + EPS)


def lion(t: int, g: Array, p: Array, s: list[Array]) -> Array:
    u = np.sign(BETA1 * s[0] + (1 - BETA1) * g)
    s[0] = BETA2 * s[0] + (1 - BETA2) * g
    return p * (1 - LR * DECAY) - LR * u


def adagrad(t: int, g: Array, p: Array, s: list[Array]) -> Array:
    g = g + DECAY * p
    s[0] = s[0] + g * g
    return p - LR / (1 + (t - 1) * LR_DECAY) * g / (np.sqrt(s[0]) + EPS)


def sgd(t: int, g: Array, p: Array, s: list[Array], nesterov: bool = False) -> Array:
    g = g + DECAY * p
    if s:
        s[0] = g if t == 1 else MOMENTUM * s[0] + (1 - DAMPENING) * g
        g = g + MOMENTUM * s[0] if nesterov else s[0]
    return p - LR * g


@dataclass(frozen=True)
class Rule:
    """An op, its constants in the schema's order, and the plain formula of them."""

    op: str
    states: int
    constants: tuple[Any, ...]
    formula: Callable[[int, Array, Array, list[Array]], Array]

    def arguments(self, on: Operands) -> tuple[Any, ...]:
        step = () if self.op == "lion_" else (on.step,)
        states = on.states or ([None] if self.op == "sgd_" else [])
        return (
            *(on.param, on.grad, *states, on.out, *step, on.scale, on.found_inf),
            *self.constants,
        )


RULES = {
    "adamw": Rule("adam_", 2, (LR, BETA1, BETA2, EPS, DECAY, True, True), adam),
    "adam_l2": Rule(
        *("adam_", 2, (LR, BETA1, BETA2, EPS, DECAY, False, True)),
        lambda t, g, p, s: adam(t, g, p, s, decoupled=False),
    ),
    "adam_uncorrected": Rule(
        *("adam_", 2, (LR, BETA1, BETA2, EPS, DECAY, True, False)),
        lambda t, g, p, s: adam(t, g, p, s, corrects=False),
    ),
    "lion": Rule("lion_", 1, (LR, BETA1, BETA2, DECAY), lion),
    "adagrad": Rule("adagrad_", 1, (LR, LR_DECAY, EPS, DECAY), adagrad),
    "sgd": Rule("sgd_", 0, (LR, 0.0, 0.0, DECAY, False), sgd),
    "momentum": Rule("sgd_", 1, (LR, MOMENTUM, DAMPENING, DECAY, False), sgd),
    "nesterov": Rule(
        *("sgd_", 1, (LR, MOMENTUM, DAMPENING, DECAY, True)),
        lambda t, g, p, s: sgd(t, g, p, s, nesterov=True),
    ),
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
        states = [state.clone() for state in self.states]
        out = None if self.out is None else self.out.clone()
        return Operands(
            *(self.param.clone(), self.grad, states, out, self.step, self.scale, self.found_inf)
        )


@dataclass(frozen=True)
class Shape:
    """How long the flat tensors are, and how many elements behind an aligned address each begins."""

    numel: int
    offsets: tuple[int, ...] = (0,)


def operands(
    rule: Rule,
    shape: Shape,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    skips: float | None = None,
) -> Operands:
    random = torch.Generator().manual_seed(shape.numel)
    grad, state, out = dtypes
    offsets = iter(shape.offsets * 8)

    def flat(dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        at = next(offsets)
        values = torch.randn(at + shape.numel + FENCE_NUMEL, generator=random) * scale
        return values.to(device, dtype)[at : at + shape.numel]

    def number(value: float) -> Tensor:
        return torch.tensor(value, device=device)

    return Operands(
        param=flat(torch.float32),
        grad=flat(grad),
        states=[flat(state, 0.1).square_() for _ in range(rule.states)],
        out=None if out is None else flat(out).zero_(),
        step=number(3.0),
        scale=number(0.5),
        found_inf=None if skips is None else number(skips),
    )


def op(name: str) -> Any:
    _module(name)
    return getattr(torch.ops.xds, name).default


def reference(name: str, *arguments: Any) -> Any:
    """What the op does in plain torch."""
    return getattr(_module(name), f"{name.rstrip('_')}_reference")(*arguments)


def _module(name: str) -> Any:
    module = "lamb" if name.startswith("lamb") else name.rstrip("_")
    return importlib.import_module(f"xds.ops.kernels.{module}")


def relative(a: Tensor, exact: Array) -> float:
    found = a.double().cpu().numpy()
    return float(np.linalg.norm(found - exact) / max(float(np.linalg.norm(exact)), 1e-300))


# ----------------------------------------------------------------------------------------------- the optimizers


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_a_thousand_steps_stay_at_the_plain_formula_in_float64(kernels: Kernels, name: str) -> None:
    rule = RULES[name]
    on = operands(rule, Shape(37), kernels.device, (torch.float32, torch.float32, torch.bfloat16))
    for state in on.states:
        state.zero_()
    param = on.param.double().cpu().numpy()
    states = [state.double().cpu().numpy() for state in on.states]
    random = torch.Generator().manual_seed(7)
    for t in range(1, 1001):
        grad = torch.randn(37, generator=random)
        on.grad, on.step = grad.to(kernels.device), torch.tensor(float(t), device=kernels.device)
        kernels.call(op(rule.op), *rule.arguments(on))
        param = rule.formula(t, 0.5 * grad.double().numpy(), param, states)
    assert relative(on.param, param) <= 2e-6
    for state, exact in zip(on.states, states, strict=True):
        assert relative(state, exact) <= 2e-6
    assert on.out is not None and torch.equal(on.out, on.param.to(torch.bfloat16))


def shapes(kernels: Kernels) -> list[Shape]:
    """Empty, lone elements, all tensors equally far from alignment, each differently."""
    long = 1_000_003 if kernels.device.type == "cuda" else 12_293
    return [
        *(Shape(0), Shape(1), Shape(15), Shape(3, (3,)), Shape(64, (2,))),
        *(Shape(long), Shape(long, (1,)), Shape(long, (1, 0, 3, 2, 1))),
    ]


def around(on: Operands) -> list[Tensor]:
    """What lies before and behind the tensors that a step writes."""
    found = []
    for tensor in on.tensors():
        assert tensor._base is not None
        base, at = tensor._base, tensor.storage_offset()
        found.append(torch.cat([base[:at], base[at + tensor.numel() :]]))
    return found


def tied_signs(on: Operands) -> Tensor:
    """Where the sign of Lion's update hangs on the last bit."""
    scale = 1.0 if on.scale is None else on.scale
    blend = BETA1 * on.states[0].double() + (1 - BETA1) * on.grad.double() * scale
    return blend.abs() < 1e-6


@pytest.mark.parametrize("name", ["adamw", "lion", "adagrad", "sgd", "momentum"])
def test_every_dtype_length_and_alignment_gives_the_references_values(
    kernels: Kernels, name: str
) -> None:
    rule = RULES[name]
    for grad, state in product(GRAD_DTYPES, STATE_DTYPES):
        for at, shape in enumerate(shapes(kernels)):
            on = operands(rule, shape, kernels.device, (grad, state, OUT_DTYPES[at % 4]))
            if at % 3 == 0:
                on.scale = None
            expected, fences = on.copy(), around(on)
            kernels.call(op(rule.op), *rule.arguments(on))
            assert all(map(torch.equal, around(on), fences))
            tied = tied_signs(expected) if rule.op == "lion_" else slice(0)
            reference(rule.op, *rule.arguments(expected))
            expected.param[tied] = on.param[tied]
            torch.testing.assert_close(on.param, expected.param, rtol=2e-6, atol=2e-7)
            for mine, theirs in zip(on.states, expected.states, strict=True):
                rtol = 8e-3 if state == torch.bfloat16 else 2e-6  # a tie may round either way
                torch.testing.assert_close(mine, theirs, rtol=rtol, atol=2e-7)
            if on.out is not None:
                assert torch.equal(on.out, on.param.to(on.out.dtype))


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RULES)
def test_what_was_written_over_the_rounded_values_is_the_value(
    kernels: Kernels, name: str, out: torch.dtype
) -> None:
    rule = RULES[name]
    for shape in shapes(kernels):
        on = operands(rule, shape, kernels.device, (torch.bfloat16, torch.float32, out))
        assert on.out is not None
        on.out.copy_(on.param)
        for at, value in enumerate((2.5, 0.0, -0.0, float("inf"), float("nan"))):
            on.out[3 * at :: 29] = value
        expected = on.copy()
        assert expected.out is not None
        take_edits(expected.param, expected.out)
        kernels.call(op(rule.op), *rule.arguments(expected))
        kernels.call(op(rule.op), *rule.arguments(on), True)
        for mine, theirs in zip(on.tensors(), expected.tensors(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_edits_are_taken_from_16_bits_only(kernels: Kernels) -> None:
    rule = RULES["adamw"]
    for out in (None, torch.float32):
        on = operands(rule, Shape(8), kernels.device, (torch.float32, torch.float32, out))
        with pytest.raises(
            RuntimeError, match="takes_edits needs an out that is bfloat16 or float16"
        ):
            kernels.call(op(rule.op), *rule.arguments(on), True)


@pytest.mark.parametrize("name", RULES)
def test_a_found_inf_changes_nothing_and_a_zero_does_not_stop(kernels: Kernels, name: str) -> None:
    rule = RULES[name]
    dtypes = (torch.float16, torch.float32, torch.float16)
    for flag in (1.0, float("inf"), float("nan")):
        on = operands(rule, Shape(1003), kernels.device, dtypes, flag)
        before = on.copy()
        kernels.call(op(rule.op), *rule.arguments(on))
        for mine, theirs in zip(on.tensors(), before.tensors(), strict=True):
            assert torch.equal(mine, theirs)
    on = operands(rule, Shape(1003), kernels.device, dtypes, 0.0)
    before = on.copy()
    kernels.call(op(rule.op), *rule.arguments(on))
    assert not torch.equal(on.param, before.param)


@pytest.mark.parametrize("name", RULES)
def test_a_step_is_one_launch(kernels: Kernels, name: str) -> None:
    rule = RULES[name]
    on = operands(
        rule, Shape(5003), kernels.device, (torch.bfloat16, torch.float32, torch.bfloat16)
    )
    assert kernels.launches(lambda: kernels.call(op(rule.op), *rule.arguments(on))) == 1


def test_cuda_is_asked_once_for_a_kernel_and_a_device(kernels: Kernels) -> None:
    if not isinstance(kernels, cuda_on_host.Host):
        pytest.skip("questions are counted where the host is the device")
    rule, found = RULES["adamw"], []
    for multiprocessors in (11, 13, 11):
        kernels.set_multiprocessors(multiprocessors)
        for grad in (torch.float32, torch.bfloat16, torch.float32):  # kernels of one C++ type
            on = operands(rule, Shape(100), kernels.device, (grad, torch.float32, None))
            run = partial(kernels.call, op(rule.op), *rule.arguments(on))
            found.append(kernels.questions(run))
    assert found == [1, 1, 0] * 2 + [0, 0, 0]


def test_an_infinite_gradient_reaches_its_own_element_alone(kernels: Kernels) -> None:
    rule = RULES["adamw"]
    on = operands(rule, Shape(1003), kernels.device, (torch.float32, torch.float32, None))
    on.grad[500] = float("nan")
    kernels.call(op(rule.op), *rule.arguments(on))
    assert torch.isnan(on.param).nonzero().flatten().tolist() == [500]


def test_what_does_not_fit_is_refused_in_a_sentence(kernels: Kernels) -> None:
    rule = RULES["adamw"]

    def refused(why: str, **changed: Any) -> None:
        on = operands(rule, Shape(8), kernels.device, (torch.float32, torch.float32, None))
        for name, value in changed.items():
            setattr(on, name, value)
        with pytest.raises(RuntimeError, match=why):
            kernels.call(op(rule.op), *rule.arguments(on))

    device = kernels.device
    like = operands(rule, Shape(8), device, (torch.float32, torch.float32, None))
    refused("adam_: grad has 7 elements and param 8", grad=torch.zeros(7, device=device))
    refused("grad is Double; it needs to be Float or BFloat16 or Half", grad=like.grad.double())
    refused(
        "exp_avg has 8 elements and param 5",
        param=torch.zeros(5, device=device),
        grad=torch.zeros(5, device=device),
    )
    refused("2 dimensions", grad=torch.zeros(2, 4, device=device))
    refused("gaps", grad=torch.zeros(16, device=device)[::2])
    refused("exp_avg_sq is BFloat16|one dtype", states=[like.param, like.param.bfloat16()])
    refused("scale is Double", scale=torch.tensor(1.0, device=device, dtype=torch.float64))
    refused("scale has 2 elements; it needs to be one number", scale=torch.ones(2, device=device))


def test_momentum_without_a_buffer_is_refused(kernels: Kernels) -> None:
    rule = Rule("sgd_", 0, (LR, MOMENTUM, 0.0, 0.0, False), sgd)
    on = operands(rule, Shape(8), kernels.device, (torch.float32, torch.float32, None))
    with pytest.raises(RuntimeError, match="momentum needs a momentum_buffer"):
        kernels.call(op(rule.op), *rule.arguments(on))


# --------------------------------------------------------------------------------------------------- square_sum


def square_sum(kernels: Kernels, flat: Tensor) -> Tensor:
    found: Tensor = kernels.call(op("square_sum"), flat)
    return found


@pytest.mark.parametrize("dtype", [*GRAD_DTYPES, torch.float64], ids=str)
def test_the_square_sum_is_exact_to_float64_whatever_the_address(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    for numel in (0, 1, 15, ROW_NUMEL, ROW_NUMEL + 1, 100_003):
        values = torch.randn(numel + 1, generator=torch.Generator().manual_seed(numel))
        shifted = values.to(kernels.device, dtype)[1:]
        total = square_sum(kernels, shifted.clone())
        assert total.dtype == torch.float64 and total.shape == ()
        assert float(total) == pytest.approx(float(shifted.double().square().sum()), rel=1e-13)
        assert torch.equal(total, square_sum(kernels, shifted))


def test_a_square_sum_and_lambs_norms_are_two_launches(kernels: Kernels) -> None:
    on = operands(LAMB, Shape(40_003), kernels.device, (torch.float32, torch.float32, None))
    direction = torch.zeros_like(on.param)
    assert kernels.launches(lambda: square_sum(kernels, on.grad)) == 2
    assert kernels.launches(lambda: run_direction(kernels, on, direction, [0, 9, 40_003])) == 2


def test_an_overflow_shows_in_the_square_sum(kernels: Kernels) -> None:
    for bad in (float("inf"), float("-inf"), float("nan")):
        flat = torch.ones(20_000, device=kernels.device, dtype=torch.float16)
        flat[12_345] = bad
        assert not torch.isfinite(square_sum(kernels, flat))
    big = torch.full((5,), 1e30, device=kernels.device)  # its square is no fp32 number
    assert float(square_sum(kernels, big)) == pytest.approx(5e60, rel=1e-6)


# ------------------------------------------------------------------------------------------------------- decide


def test_a_decision_has_the_numbers_of_the_host_in_one_launch(kernels: Kernels) -> None:
    draw = torch.Generator().manual_seed(0)
    for ranks, limit in product((1, 3, 1000), (0.0, 0.5, 1e9)):
        table = torch.rand(ranks, 2, generator=draw, dtype=torch.float64)
        table[:, 1] = 0
        for bad in (None, float("inf"), float("nan"), 0.0, "says"):
            rows = table.clone()
            if bad == "says":
                rows[-1, 1] = 2
            elif bad is not None:
                rows[:, 0] = bad
            arguments = (rows.to(kernels.device), 1e-20, 0.25, limit)
            found = kernels.call(op("decide"), *arguments).cpu()
            want = decide_reference(rows, *arguments[1:])
            assert torch.equal(found[2:], want[2:]) and bool(found[3]) is (bad is None)
            if bad is None:
                assert torch.equal(found, want)
    assert kernels.launches(lambda: kernels.call(op("decide"), *arguments)) == 1


# --------------------------------------------------------------------------------------------------------- LAMB


def cuts(numel: int) -> dict[str, list[int]]:
    """Ways to cut [0, numel) into parts, or some of it."""
    random = np.random.default_rng(0)
    return {
        "one": [0, numel],
        "none": [0],
        "rows": list(range(0, numel + 1, ROW_NUMEL)),
        "small": [0, *np.cumsum(random.integers(0, 60, 500)).tolist()],
        "mixed": sorted([0, numel, *random.integers(0, numel, 6).tolist()]),
        "margins": [7, 7, 5000, ROW_NUMEL, ROW_NUMEL, 2 * ROW_NUMEL + 5, numel - 3, numel - 3],
    }


def lamb_exact(on: Operands, bounds: Sequence[int]) -> tuple[Array, Array]:
    param = on.param.double().cpu().numpy()
    grad = 0.5 * on.grad.double().cpu().numpy()
    mean, square = (state.double().cpu().numpy() for state in on.states)
    mean = BETA1 * mean + (1 - BETA1) * grad
    square = BETA2 * square + (1 - BETA2) * grad * grad
    direction = mean / (1 - BETA1**3) / (np.sqrt(square / (1 - BETA2**3)) + EPS) + DECAY * param
    norms = [
        [float((param[a:b] ** 2).sum()), float((direction[a:b] ** 2).sum())]
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    return direction, np.array(norms).reshape(-1, 2)


def run_direction(
    kernels: Kernels, on: Operands, direction: Tensor, bounds: Sequence[int]
) -> Tensor:
    device = kernels.device
    norms = torch.full((len(bounds) - 1, 2), -1.0, dtype=torch.float64, device=device)
    kernels.call(
        op("lamb_direction_"),
        *(on.param, on.grad, *on.states, direction, norms, torch.tensor(bounds, device=device)),
        *(on.step, on.scale, on.found_inf, BETA1, BETA2, EPS, DECAY, True),
    )
    return norms


LAMB = Rule("lamb_direction_", 2, (), adam)


@pytest.mark.parametrize("cut", cuts(100))
def test_lamb_has_the_direction_and_every_parts_norms(kernels: Kernels, cut: str) -> None:
    for offsets, grad, state in [
        ((0,), torch.float32, torch.float32),
        ((0, 1, 2), torch.bfloat16, torch.float32),
        ((1,), torch.float16, torch.bfloat16),
    ]:
        shape = Shape(40_003, offsets)
        bounds = cuts(shape.numel)[cut]
        on = operands(LAMB, shape, kernels.device, (grad, state, None))
        exact, norms = lamb_exact(on, bounds)
        # in the gradient's memory, where that is fp32
        direction = on.grad if grad == torch.float32 else torch.zeros_like(on.param)
        found = run_direction(kernels, on, direction, bounds)
        assert relative(direction, exact) <= 2e-6
        np.testing.assert_allclose(found.cpu().numpy(), norms, rtol=2e-6, atol=1e-12)


def test_lambs_norms_depend_on_the_bounds_alone(kernels: Kernels) -> None:
    bounds = cuts(40_003)["mixed"]
    found = []
    for offsets in ((0,), (1,), (0, 1, 2, 3)):
        for multiprocessors in (1, 3, 7):
            on = operands(
                LAMB, Shape(40_003, offsets), kernels.device, (torch.float32,) * 2 + (None,)
            )
            values = torch.arange(40_003, device=kernels.device) % 1009 / 1009
            for tensor in (on.param, on.grad, *on.states):
                tensor.copy_(values)
            if isinstance(kernels, cuda_on_host.Host):
                kernels.set_multiprocessors(multiprocessors)
            found.append(run_direction(kernels, on, torch.zeros_like(on.param), bounds))
    assert all(torch.equal(norms, found[0]) for norms in found)


def test_lamb_applies_each_parts_rate_and_leaves_what_is_in_none(kernels: Kernels) -> None:
    for (cut, bounds), out_dtype in product(cuts(40_003).items(), OUT_DTYPES):
        offsets = (0,) if cut == "mixed" else (1, 0)
        on = operands(
            LAMB, Shape(40_003, offsets), kernels.device, (torch.float32, torch.float32, out_dtype)
        )
        rates = torch.rand(len(bounds) - 1, generator=torch.Generator().manual_seed(1))
        rate_of = np.zeros(40_003)
        for rate, start, stop in zip(rates.tolist(), bounds, bounds[1:], strict=False):
            rate_of[start:stop] = rate
        exact = on.param.double().cpu().numpy() - rate_of * on.grad.double().cpu().numpy()
        kernels.call(
            op("lamb_apply_"),
            *(on.param, on.grad, on.out, torch.tensor(bounds, device=kernels.device)),
            *(rates.to(kernels.device), None),
        )
        np.testing.assert_allclose(on.param.double().cpu().numpy(), exact, rtol=1e-6, atol=1e-6)
        if on.out is not None:
            assert torch.equal(on.out, on.param.to(on.out.dtype))


def test_lamb_changes_nothing_where_an_inf_was_found(kernels: Kernels) -> None:
    on = operands(LAMB, Shape(9000), kernels.device, (torch.float32,) * 3, 1.0)
    before = on.copy()
    norms = run_direction(kernels, on, torch.zeros_like(on.param), [0, 10, 9000])
    assert (norms == -1.0).all()
    kernels.call(
        op("lamb_apply_"),
        *(on.param, on.grad, on.out, torch.tensor([0, 9000], device=kernels.device)),
        *(torch.ones(1, device=kernels.device), on.found_inf),
    )
    for mine, theirs in zip(on.tensors(), before.tensors(), strict=True):
        assert torch.equal(mine, theirs)


# ------------------------------------------------------------------------------ what a GPU alone shows


@pytest.fixture(scope="module")
def gpu() -> cuda_on_host.Gpu:
    return cuda_on_host.gpu("cuda_optimizers")


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_no_step_waits_for_the_device(gpu: cuda_on_host.Gpu, name: str) -> None:
    rule = RULES[name]
    on = operands(
        rule, Shape(100_003), gpu.device, (torch.bfloat16, torch.float32, torch.bfloat16), 0.0
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        gpu.call(op(rule.op), *rule.arguments(on))
        gpu.call(op("square_sum"), on.grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_steps_are_captured_in_a_graph_and_run_on_the_current_stream(gpu: cuda_on_host.Gpu) -> None:
    """A capture fails on a wait, and on a launch to any other stream."""
    rule = RULES["adamw"]
    on = operands(rule, Shape(100_003), gpu.device, (torch.bfloat16, torch.float32, torch.bfloat16))
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
def test_elements_beyond_two_to_the_32_are_reached(gpu: cuda_on_host.Gpu) -> None:
    numel = 2**32 + 5
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free GPU memory")
    flat = torch.ones(numel, dtype=torch.bfloat16, device=gpu.device)
    assert float(gpu.call(op("square_sum"), flat)) == numel
    rule = RULES["lion"]
    param = torch.zeros(numel, device=gpu.device)
    state = torch.zeros(numel, dtype=torch.bfloat16, device=gpu.device)
    on = Operands(param, flat, [state], None, torch.ones((), device=gpu.device), None, None)
    gpu.call(op(rule.op), *rule.arguments(on))
    assert bool((param == -torch.tensor(LR, device=gpu.device)).all())
