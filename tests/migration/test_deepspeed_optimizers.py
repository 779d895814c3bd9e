"""Tests of DeepSpeed's optimizer classes, alone and in an engine, and of those of users that see shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer import assert_close, on_ranks, start, whole_values
from torch import Tensor, nn

import xds
from xds.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from xds.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from xds.deepspeed.ops.lamb import FusedLamb
from xds.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from xds.ops.optim.adam import Adam
from xds.ops.optim.lamb import Lamb
from xds.ops.optim.lion import Lion

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
PAIRS: dict[str, tuple[Make, Make]] = {
    "FusedAdam": (
        lambda params: FusedAdam(params, lr=1e-2, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    ),
    "FusedAdam L2": (
        lambda params: FusedAdam(params, 1e-2, adam_w_mode=False, weight_decay=0.1),
        lambda params: torch.optim.Adam(params, 1e-2, weight_decay=0.1),
    ),
    "DeepSpeedCPUAdam": (
        lambda params: DeepSpeedCPUAdam(params, betas=(0.8, 0.9)),
        lambda params: torch.optim.AdamW(params, betas=(0.8, 0.9), weight_decay=0.0),
    ),
    "DeepSpeedCPUAdagrad": (DeepSpeedCPUAdagrad, torch.optim.Adagrad),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))


def trained(make: Make, start: Tensor, grads: list[Tensor]) -> tuple[Tensor, torch.optim.Optimizer]:
    param = nn.Parameter(start.clone())
    optimizer = make([param])
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach(), optimizer


# -- alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
def test_an_optimizer_in_a_plain_loop_steps_like_torchs(name: str) -> None:
    for begin in (torch.randn(6, 5).t(), torch.randn(5, 6)):
        grads = [torch.randn(5, 6) for _ in range(5)]
        found, wanted = (trained(make, begin, grads)[0] for make in PAIRS[name])
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_adagrad_takes_sparse_gradients_and_adam_names_the_alternative() -> None:
    grads = [
        torch.sparse_coo_tensor([[1, 3]], torch.randn(2, 4), (6, 4), check_invariants=True)
        for _ in range(3)
    ]
    start = torch.randn(6, 4)
    found = trained(DeepSpeedCPUAdagrad, start, grads)[0]
    wanted = trained(torch.optim.Adagrad, start, [grad.to_dense() for grad in grads])[0]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    with pytest.raises(xds.UsageError, match="sparse gradient.*SparseAdam"):
        trained(FusedAdam, start, grads)


@pytest.mark.parametrize("has_fp32_states", [True, False])
def test_states_of_16_bit_parameters_have_the_dtype_that_is_asked_for(
    has_fp32_states: bool,
) -> None:
    begin = torch.ones(7, dtype=torch.bfloat16)
    make = lambda params: DeepSpeedCPUAdam(params, lr=0.1, fp32_optimizer_states=has_fp32_states)  # noqa: E731
    found, optimizer = trained(make, begin, [torch.ones_like(begin)] * 3)
    (state,) = optimizer.state.values()
    wanted = torch.float32 if has_fp32_states else torch.bfloat16
    assert state["step"] == 3 and state["exp_avg"].dtype == state["exp_avg_sq"].dtype == wanted
    assert found.dtype == torch.bfloat16 and (found - begin).abs().max() > 0


def test_lion_and_lamb_alone_move_as_their_formulas_say() -> None:
    begin, grad = torch.randn(50), torch.randn(50)
    for make in (FusedLion, DeepSpeedCPULion):
        torch.testing.assert_close(trained(make, begin, [grad])[0], begin - 1e-3 * grad.sign())
    moved = (trained(FusedLamb, begin, [grad])[0] - begin).norm()
    torch.testing.assert_close(moved, 1e-3 * begin.norm(), rtol=1e-4, atol=0.0)


def test_the_engines_adam_is_an_instance_of_deepspeeds_classes() -> None:
    params = [nn.Parameter(torch.ones(3))]
    made = Adam(params, adam_w_mode=False)
    assert isinstance(made, FusedAdam) and isinstance(made, DeepSpeedCPUAdam)
    assert made.adam_w_mode is False
    assert isinstance(FusedAdam(params), torch.optim.Optimizer)
    assert not isinstance(torch.optim.Adam(params), FusedAdam)
    assert not isinstance(FusedAdam(params), DeepSpeedCPUAdam)


def test_what_cannot_be_honoured_is_refused() -> None:
    for make in (FusedAdam, DeepSpeedCPUAdam, FusedLamb, DeepSpeedCPUAdagrad):
        with pytest.raises(xds.UsageError, match="amsgrad=True"):
            make(build().parameters(), amsgrad=True)
    with pytest.raises(xds.UsageError, match="max_grad_norm=1.0.*gradient_clipping"):
        FusedLamb(build().parameters(), max_grad_norm=1.0)
    for of_shards in (Adam, Lion, Lamb):
        model = build()
        optimizer = of_shards(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(xds.UsageError, match="cannot be stepped alone; pass it to initialize"):
            optimizer.step()


# -- in an engine -----------------------------------------------------------------------------------------


def train(engine: Any, steps: int) -> None:
    for number in range(steps):
        engine.backward(engine(torch.full((2, 4), 0.1 * (number + 1))).square().mean())
        engine.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_an_optimizer_by_deepspeeds_name_steps_like_torchs(stage: int) -> None:
    for ours, plain in PAIRS.values():
        model, reference = build(), build()
        optimizer, other = ours(model.parameters()), plain(reference.parameters())
        engine = start(model, stage, optimizer=optimizer)
        assert engine.basic_optimizer is optimizer
        train(engine, 3)
        for number in range(3):
            reference(torch.full((2, 4), 0.1 * (number + 1))).square().mean().backward()
            other.step()
            other.zero_grad()
        assert_close(whole_values(engine), reference.parameters(), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_lion_lamb_sgd_and_adagrad_step_in_the_engine() -> None:
    for make in (FusedLion, DeepSpeedCPULion, FusedLamb):
        model = build()
        before = model[0].weight.detach().clone()
        train(start(model, 2, optimizer=make(model.parameters(), lr=1e-2)), 1)
        moved = (model[0].weight - before).abs()
        assert moved.max() > 0
        if make is not FusedLamb:
            assert moved.max().item() == pytest.approx(1e-2)  # a sign times the learning rate
    for kind in ("SGD", "Adagrad"):  # those of a config count as torch's
        for precision in ("bf16", "fp32"):
            optimizer = start(build(), 2, precision, kind=kind).optimizer.optimizer
            assert isinstance(optimizer, getattr(torch.optim, kind))


# -- whose update is not per element ----------------------------------------------------------------------


class Shampoo(torch.optim.SGD):
    """An optimizer of a library, as far as its name goes."""


class Tuned(torch.optim.Adafactor):
    """A class that is made from one that sees shapes."""


def adafactor(params: Any) -> Any:
    return torch.optim.Adafactor(params)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, processes=True)
def test_the_first_rank_warns_once_of_an_optimizer_that_sees_shapes(stage: int) -> None:
    counts = []
    for make in (Shampoo, Tuned, torch.optim.Adafactor, torch.optim.AdamW, adafactor):
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record, said=said: said.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("xds")
        log.addHandler(handler)
        model = build()
        optimizer = adafactor if make is adafactor else make(model.parameters())
        start(model, stage, optimizer=optimizer, zero_allow_untested_optimizer=True).destroy()
        log.removeHandler(handler)
        found = [text for text in said if "1-D shards" in text]
        counts.append(len(found))
        if make is Shampoo and found:
            assert found[0].startswith("Shampoo: its update depends on the shape")
    assert counts == ([1, 1, 1, 0, 1] if dist.get_rank() == 0 else [0] * 5)


@on_ranks(2)
def test_without_the_users_word_it_is_refused_on_shards_and_at_stage_0_gets_whole_parameters() -> (
    None
):
    for make in (torch.optim.Adafactor, adafactor):
        model, other, expected = build(), build(), build()
        refused, optimizer = (
            adafactor if make is adafactor else make(one.parameters()) for one in (other, model)
        )
        with pytest.raises(xds.UsageError, match="Adafactor: this optimizer may use the shape"):
            start(other, 2, optimizer=refused)
        engine, plain = start(model, optimizer=optimizer), make(expected.parameters())
        batch = torch.arange(4.0).view(1, 4)
        for _ in range(3):
            engine.backward(engine(batch).sum())
            engine.step()
            expected(batch).sum().backward()
            plain.step()
            plain.zero_grad()
        torch.testing.assert_close(engine(batch).detach(), expected(batch).detach())
