"""Tests of the CPU kernels against their plain torch references, each other, and float64."""

from __future__ import annotations

import math
import pydoc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from xds.ops.kernels.adagrad import adagrad_reference
from xds.ops.kernels.adam import adam_, adam_reference
from xds.ops.kernels.frozen_adam import frozen_adam_reference
from xds.ops.kernels.lamb import lamb_apply_reference, lamb_direction_reference
from xds.ops.kernels.lion import lion_reference
from xds.ops.kernels.sgd import sgd_reference
from xds.ops.kernels.square_sum import square_sum_reference
from xds.ops.libraries import load
from xds.ops.optim.edits import take_edits

INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NUMEL = 3 * 4096 + 1027  # several tiles and a ragged end
NOTHING = torch.tensor(0.0)
STEP, SCALE = torch.tensor(3.0), torch.tensor(0.25)

# name: its reference, states, and what follows step, scale and found_inf
OPTIMIZERS: dict[str, tuple[Callable[..., None], int, bool, tuple[Any, ...]]] = {
    "adam_": (adam_reference, 2, True, (1e-2, 0.9, 0.99, 1e-8, 0.1, True, True)),
    "adam_ with L2": (adam_reference, 2, True, (1e-2, 0.9, 0.99, 1e-8, 0.1, False, False)),
    "frozen_adam_": (frozen_adam_reference, 2, False, (1e-2, 0.9, 1.5, 1e-8, 1e-3, 8e-3, False)),
    "frozen_adam_ of momenta": (
        *(frozen_adam_reference, 2, False),
        (1e-2, 0.9, 1.5, 1e-8, 1e-3, 8e-3, True),
    ),
    "lion_": (lion_reference, 1, False, (1e-2, 0.9, 0.99, 0.1)),
    "adagrad_": (adagrad_reference, 1, True, (1e-2, 0.1, 1e-10, 0.1)),
    "sgd_": (sgd_reference, 1, True, (1e-2, 0.9, 0.1, 0.1, False)),
    "sgd_ with nesterov": (sgd_reference, 1, True, (1e-2, 0.9, 0.0, 0.1, True)),
    "sgd_ without momentum": (sgd_reference, 0, True, (1e-2, 0.0, 0.0, 0.1, False)),
}


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    load("cpu", require=True)


@pytest.fixture
def instruction_sets(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[str]]:
    """Go through those that this processor has; the op uses the one of the turn."""

    def turns() -> Iterator[str]:
        for name in INSTRUCTION_SETS:
            monkeypatch.setenv("XDS_CPU_ISA", name)
            try:
                torch.ops.xds.square_sum(torch.ones(1))
            except RuntimeError:
                continue
            yield name
        monkeypatch.delenv("XDS_CPU_ISA")  # it may name one that this processor lacks

    return turns


def op(name: str) -> Any:
    return getattr(torch.ops.xds, name.split()[0])


def arguments(
    name: str,
    grad: torch.dtype,
    state: torch.dtype,
    out: torch.dtype | None,
    numel: int = NUMEL,
    step: Tensor = STEP,
    found_inf: Tensor | None = NOTHING,
) -> list[Any]:
    _, states, has_step, rest = OPTIMIZERS[name]
    torch.manual_seed(numel)
    found: list[Any] = [torch.randn(numel), torch.randn(numel).to(grad)]
    found += [torch.rand(numel).to(state) for _ in range(states)]
    if name.startswith("sgd_") and states == 0:
        found.append(None)
    found.append(None if out is None else torch.zeros(numel, dtype=out))
    return [*found, *([step] if has_step else []), SCALE, found_inf, *rest]


def copied(args: list[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in args]


def assert_close(got: list[Any], want: list[Any]) -> None:
    for one, other in zip(got, want, strict=True):
        if isinstance(one, Tensor):
            tolerance = 2e-6 if one.dtype == torch.float32 else 1e-2
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def assert_equal(got: list[Any], want: list[Any]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one is other or not isinstance(one, Tensor) or torch.equal(one, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_a_kernel_does_what_its_reference_does(name: str, state: torch.dtype) -> None:
    reference = OPTIMIZERS[name][0]
    for grad in FLOATS:
        for out in (None, *FLOATS):
            given = arguments(name, grad, state, out)
            got, want = copied(given), copied(given)
            op(name)(*got)
            reference(*want)
            assert_close(got, want)
            assert torch.equal(got[1], given[1])  # the gradient is left as it is
            if out is not None:
                written = next(v for v in got[2:] if isinstance(v, Tensor) and v.dtype == out)
                assert written.shape == given[0].shape


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_cast_rounds_the_very_value_that_the_master_gets(name: str) -> None:
    for out in FLOATS:
        given = arguments(name, torch.bfloat16, torch.float32, out)
        op(name)(*given)
        at = 2 + max(OPTIMIZERS[name][1], int(name.startswith("sgd_")))
        assert torch.equal(given[at], given[0].to(out))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_instruction_set_and_number_of_threads_gives_the_same_bits(
    name: str, instruction_sets: Callable[[], Iterator[str]]
) -> None:
    for grad, state, out in ((torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.float16,) * 3):
        state = torch.bfloat16 if state == torch.float16 else state
        for numel in (NUMEL, 5 * (1 << 15)):
            given = arguments(name, grad, state, out, numel)
            results = []
            for _ in instruction_sets():
                results.append(copied(given))
                op(name)(*results[-1])
            threads = torch.get_num_threads()
            torch.set_num_threads(2)
            results.append(copied(given))
            op(name)(*results[-1])
            torch.set_num_threads(threads)
            for other in results[1:]:
                assert_equal(results[0], other)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("numel", [0, 1, 15, 1023, 1025])
def test_a_shard_gets_the_bits_that_it_gets_as_part_of_the_whole(name: str, numel: int) -> None:
    given = arguments(name, torch.bfloat16, torch.float32, torch.bfloat16)
    whole = copied(given)
    op(name)(*whole)
    for start in (0, 1, 7):  # unaligned, too
        part = [
            v[start : start + numel] if isinstance(v, Tensor) and v.dim() else v
            for v in copied(given)
        ]
        op(name)(*part)
        cut = [v[start : start + numel] if isinstance(v, Tensor) and v.dim() else v for v in whole]
        assert_equal(part, cut)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_changes_nothing(name: str) -> None:
    given = arguments(
        name, torch.float16, torch.float32, torch.float16, found_inf=torch.tensor(1.0)
    )
    got = copied(given)
    op(name)(*got)
    assert_equal(got, given)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_sees_an_op_as_it_should(name: str) -> None:
    torch.library.opcheck(
        op(name).default,
        tuple(arguments(name, torch.bfloat16, torch.float32, torch.bfloat16, 100)),
        test_utils=("test_schema", "test_faketensor"),
    )


def written_over(param: Tensor, dtype: torch.dtype) -> Tensor:
    """`param` rounded, with some elements written over: other values, zeros of both signs, inf and nan."""
    out = param.to(dtype)
    out[::7] = torch.randn(out[::7].numel()).to(dtype)
    for at, value in enumerate((0.0, -0.0, math.inf, -math.inf, math.nan, 1e-7)):
        out[5 + 100 * at :: 997] = value
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_was_written_over_the_rounded_values_is_the_value(
    name: str, dtype: torch.dtype, instruction_sets: Callable[[], Iterator[str]]
) -> None:
    at = 2 + max(OPTIMIZERS[name][1], int(name.startswith("sgd_")))
    for is_edited in (True, False):
        given = arguments(name, dtype, torch.float32, dtype)
        given[0][::11] *= 1e-6  # what is narrower than it was, and what rounds to nothing
        given[at] = written_over(given[0], dtype) if is_edited else given[0].to(dtype)
        want = copied(given)
        take_edits(want[0], want[at])
        assert torch.equal(want[0], given[0]) != is_edited
        op(name)(*want)
        for _ in instruction_sets():
            got = copied(given)
            op(name)(*got, True)
            for one, other in zip(got, want, strict=True):
                if isinstance(one, Tensor):
                    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        by_reference = copied(given)
        OPTIMIZERS[name][0](*by_reference, True)
        finite = want[0].isfinite()  # decay taken off an inf is nan in one of two orders
        assert_close([by_reference[0][finite]], [want[0][finite]])


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_old_values_in_other_memory_give_the_same_bits(
    name: str, state: torch.dtype, instruction_sets: Callable[[], Iterator[str]]
) -> None:
    _, states, *_ = OPTIMIZERS[name]
    numel = NUMEL + 3  # a ragged end; one more element in front makes stores unaligned
    for skip in (0, 1):
        for _ in instruction_sets():
            inplace = arguments(name, torch.bfloat16, state, torch.bfloat16, numel)
            inplace[2 + max(1, states)] = inplace[0].bfloat16()  # out, which a script has edited
            inplace[2 + max(1, states)][7] = 3.0
            apart = list(inplace)
            changed = [0, *range(2, 2 + states)]
            for at in (*changed, 2 + max(1, states)):
                inplace[at] = inplace[at].clone()
            for at in changed:
                memory = torch.full((numel + skip,), torch.nan, dtype=inplace[at].dtype)
                apart[at] = memory[skip:]
            olds = [value.clone() for value in (inplace[at] for at in changed)]
            op(name)(*inplace, True)
            op(name)(*apart, True, *olds)
            for one, other in zip(inplace, apart, strict=True):
                if isinstance(one, Tensor) and one.dim():
                    assert torch.equal(one, other)


def test_edits_are_taken_from_16_bits_only() -> None:
    for out in (None, torch.float32):
        with pytest.raises(
            RuntimeError, match="takes_edits needs an out that is bfloat16 or float16"
        ):
            op("adam_")(*arguments("adam_", torch.float32, torch.float32, out), True)


def test_sgd_begins_with_the_gradient() -> None:
    given = arguments(
        "sgd_", torch.float32, torch.float32, None, step=torch.tensor(1.0), found_inf=None
    )
    given[2].fill_(math.nan)  # memory that was never written
    want = copied(given)
    op("sgd_")(*given)
    sgd_reference(*want)
    assert_close(given, want)


# -- numerics -----------------------------------------------------------------------------------------------


def test_a_thousand_steps_of_adam_stay_near_float64() -> None:
    torch.manual_seed(0)
    numel = 20_000
    param = torch.randn(numel)
    got = [param.clone(), torch.zeros(numel), torch.zeros(numel)]
    want = [param.double(), torch.zeros(numel).double(), torch.zeros(numel).double()]
    rest = (None, None, 1e-3, 0.9, 0.999, 1e-8, 0.01, True, True)
    for step in range(1, 1001):
        grad = torch.randn(numel)
        count = torch.tensor(float(step))
        torch.ops.xds.adam_(got[0], grad, *got[1:], None, count, *rest)
        adam_reference(want[0], grad.double(), *want[1:], None, count, *rest)
    for one, other in zip(got, want, strict=True):
        assert (one.double() - other).norm() / other.norm() <= 2e-6


def patterns() -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_widened_exactly_and_narrowed_to_itself(
    dtype: torch.dtype, instruction_sets: Callable[[], Iterator[str]]
) -> None:
    narrow = patterns().view(dtype)
    for _ in instruction_sets():
        param, out = torch.zeros(narrow.numel()), torch.zeros_like(narrow)
        one = torch.tensor(2.0)
        torch.ops.xds.sgd_(param, narrow, None, out, one, None, None, -1.0, 0.0, 0.0, 0.0, False)
        assert torch.equal(param.nan_to_num(), narrow.float().nan_to_num() + 0.0)
        assert torch.equal(out.isnan(), narrow.isnan())
        assert torch.equal(out.nan_to_num(), narrow.nan_to_num() + 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_between_two_are_rounded_to_nearest_even(
    dtype: torch.dtype, instruction_sets: Callable[[], Iterator[str]]
) -> None:
    narrow = patterns().view(dtype).float()
    finite = narrow[narrow.isfinite()]
    high = torch.nextafter(finite.to(dtype), torch.tensor(math.inf, dtype=dtype)).float()
    middle = finite / 2 + high / 2
    near = [middle, *(torch.nextafter(middle, torch.tensor(way)) for way in (-math.inf, math.inf))]
    values = torch.cat([*near, torch.tensor([3.4e38, -3.4e38, 65519.9, 65520.0, 1e-45, math.nan])])
    for _ in instruction_sets():
        param, out = values.clone(), torch.zeros(values.numel(), dtype=dtype)
        bounds, rates = torch.tensor([0, values.numel()]), torch.zeros(1)
        torch.ops.xds.lamb_apply_(param, torch.zeros_like(values), out, bounds, rates, None)
        want = values.to(dtype)
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out.nan_to_num().view(torch.int16), want.nan_to_num().view(torch.int16))


# -- sums and LAMB ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 63, 1024, 4097, 1_000_003])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_square_sum_is_right_and_always_the_same(
    numel: int, dtype: torch.dtype, instruction_sets: Callable[[], Iterator[str]]
) -> None:
    flat = torch.randn(numel + 1).to(dtype)
    want = float(flat[:numel].double().square().sum())
    seen = set()
    for _ in instruction_sets():
        for threads in (1, 2):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            moved = torch.empty(numel + 3, dtype=dtype)[3:].copy_(flat[:numel])  # elsewhere
            seen |= {float(torch.ops.xds.square_sum(x)) for x in (flat[:numel], moved)}
            torch.set_num_threads(before)
    assert len(seen) == 1
    assert seen.pop() == pytest.approx(want, rel=1e-7)
    assert float(square_sum_reference(flat[:numel])) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 1024, NUMEL - 1])
def test_the_square_sum_tells_an_overflow(bad: float, at: int) -> None:
    for dtype in FLOATS:
        flat = torch.ones(NUMEL, dtype=dtype)
        flat[at] = bad
        assert not math.isfinite(float(torch.ops.xds.square_sum(flat)))


def lamb(ops: tuple[Any, Any], given: list[Any], bounds: Tensor, out: Tensor) -> list[Any]:
    param, grad, mean, square = given
    direction = grad if grad.dtype == torch.float32 else torch.empty_like(param)
    norms = torch.zeros(len(bounds) - 1, 2, dtype=torch.float64)
    rest = (STEP, SCALE, None, 0.9, 0.99, 1e-8, 0.1, True)
    ops[0](param, grad, mean, square, direction, norms, bounds, *rest)
    rates = (norms[:, 0] / (norms[:, 1] + 1e-9)).sqrt().float() * 1e-2
    ops[1](param, direction, out, bounds, rates, None)
    return [param, mean, square, direction, norms, out]


@pytest.mark.parametrize("grad", FLOATS)
def test_lambs_kernels_do_what_their_references_do(
    grad: torch.dtype, instruction_sets: Callable[[], Iterator[str]]
) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([5, 5, 900, 9000, NUMEL - 3])  # an empty part, and elements in none
    given = [torch.randn(NUMEL), torch.randn(NUMEL).to(grad), *torch.rand(2, NUMEL)]
    out = torch.zeros(NUMEL, dtype=torch.bfloat16)
    references = (lamb_direction_reference, lamb_apply_reference)
    want = lamb(references, copied(given), bounds, out.clone())
    results = []
    for _ in instruction_sets():
        kernels = (torch.ops.xds.lamb_direction_, torch.ops.xds.lamb_apply_)
        results.append(lamb(kernels, copied(given), bounds, out.clone()))
        assert_close(results[-1][:4], want[:4])
        torch.testing.assert_close(results[-1][4], want[4], rtol=1e-6, atol=0)
        # elements in no part: the kernels write the cast of what is there, the reference as well
        assert torch.equal(results[-1][5], results[-1][0].bfloat16())
    for other in results[1:]:
        assert_equal(results[0], other)


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, torch.zeros(NUMEL, dtype=torch.bfloat16), "param must be float32"),
        (1, torch.zeros(NUMEL + 1), "grad has"),
        (1, torch.zeros(NUMEL, dtype=torch.int32), "grad must be float32, bfloat16 or float16"),
        (1, torch.zeros(2 * NUMEL)[::2], "grad must be contiguous"),
        (2, torch.zeros(NUMEL, dtype=torch.float16), "both states must have one dtype"),
        (5, torch.zeros(2), "step has 2 elements"),
        (5, torch.tensor(3), "step must be float32"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused_with_what_it_needs(
    at: int, value: Tensor, said: str
) -> None:
    given = arguments("adam_", torch.float32, torch.float32, None)
    given[at] = value
    with pytest.raises(RuntimeError, match=said):
        torch.ops.xds.adam_(*given)


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDS_CPU_ISA", "sse9")
    with pytest.raises(RuntimeError, match='XDS_CPU_ISA = "sse9".*unset it'):
        torch.ops.xds.square_sum(torch.ones(1))


def test_an_op_has_the_signature_and_the_docstring_of_its_reference() -> None:
    text = pydoc.render_doc(adam_, renderer=pydoc.plaintext)
    assert "adam_(param: " in text and "takes_edits: 'bool' = False" in text
    assert "One step." in text and "the master weights" in text


def test_arguments_of_an_op_may_be_named() -> None:
    for dtype in (torch.float32, torch.float64):
        param, grad, mean, square = (torch.ones(3, dtype=dtype) for _ in range(4))
        numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
        adam_(
            *(param, grad, mean, square),
            **{"out": None, "step": torch.ones(()), "scale": None, "found_inf": None},
            **numbers,
            decoupled=True,
            bias_correction=False,
        )
        assert torch.allclose(param, torch.full_like(param, 0.9))
