"""Optimizers and schedules of scripts, in every form: exact, or refused by a sentence before training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config
from torch import Tensor, nn

import xds
from xds.ops.optim.lion import Lion

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def engine_of(stage: int, given: Any, model: nn.Module | None = None, **more: Any) -> xds.Engine:
    settings = config(stage, samples=4, **more)
    del settings["optimizer"]
    return xds.initialize(build() if model is None else model, settings, optimizer=given)


def plain(optimizer: Callable[[Any], torch.optim.Optimizer], steps: int = 3) -> dict[str, Tensor]:
    model = build()
    made = optimizer(model.parameters())
    for _ in range(steps):
        made.zero_grad()
        model(X).square().mean().backward()
        made.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def trained(engine: xds.Engine, steps: int = 3) -> dict[str, Tensor]:
    for _ in range(steps):
        engine.backward(engine(X).square().mean())
        engine.step()
    found = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return found


# -- what a class gets does not depend on how it is given ------------------------------------------------------


class NormalizedSGD(torch.optim.Optimizer):
    """A step of length lr for each parameter, which has to be whole."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / p.grad.norm())


class WithStates(NormalizedSGD):
    """Makes its states in the constructor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["shape"] = p.shape

    def step(self, closure: Any = None) -> None:
        assert all(self.state[p]["shape"] == p.shape for p in self.param_groups[0]["params"])
        super().step()


def function(groups: Any) -> torch.optim.Optimizer:
    return NormalizedSGD(groups)


def accumulating(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5)


def by_size(params: Any) -> torch.optim.Optimizer:
    params = (
        [p for group in params for p in group["params"]] if isinstance(params, list) else params
    )
    split: tuple[list[Any], list[Any]] = [], []
    for p in params:
        split[p.dim() > 1].append(p)
    return torch.optim.AdamW(
        [{"params": split[0], "weight_decay": 0.0}, {"params": split[1], "weight_decay": 0.9}],
        lr=0.1,
    )


def forms(stage: int) -> None:
    wanted = plain(NormalizedSGD)
    for given in (
        NormalizedSGD,
        "object",
        lambda groups: NormalizedSGD(groups),
        functools.partial(NormalizedSGD, lr=0.1),
        function,
        WithStates,
        lambda groups: WithStates(groups),
    ):
        model = build()
        optimizer = NormalizedSGD(model.parameters()) if given == "object" else given
        if stage:
            with pytest.raises(xds.UsageError, match="may use the shape of a parameter"):
                engine_of(stage, optimizer, model)
        else:
            torch.testing.assert_close(trained(engine_of(stage, optimizer, model)), wanted)
    model = build()
    for given in (accumulating(model.parameters()), accumulating):
        found = trained(engine_of(stage, given, model if given is not accumulating else None))
        torch.testing.assert_close(found, plain(accumulating))
    lion = trained(engine_of(stage, lambda groups: Lion(groups, lr=0.01)))
    torch.testing.assert_close(lion, trained(engine_of(stage, functools.partial(Lion, lr=0.01))))
    if not stage:
        torch.testing.assert_close(trained(engine_of(stage, by_size)), plain(by_size))


def in_every_form() -> None:
    for stage in (0, 1, 3):
        forms(stage)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_class_is_exact_or_refused_in_every_form(ranks: int) -> None:
    run_ranks(in_every_form if ranks > 1 else forms, ranks, *(() if ranks > 1 else (0,)))


# -- what the engine cannot step --------------------------------------------------------------------------------


class NeedsLoss(torch.optim.SGD):
    def step(self, loss: Tensor) -> None:  # type: ignore[override]
        raise AssertionError


def refusals() -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    for kind, text in (
        (torch.optim.LBFGS, "LBFGS: needs several loss evaluations per step"),
        (torch.optim.SparseAdam, "SparseAdam: sparse gradients"),
        (NeedsLoss, r"NeedsLoss: its step\(\) needs loss, and the engine has none"),
    ):
        for stage in (0, 2):
            model = build()
            for given in (
                kind,
                lambda groups, kind=kind: kind(groups),
                kind(list(model.parameters())),
            ):
                with pytest.raises(xds.UsageError, match=text):
                    engine_of(stage, given, model)
    with pytest.raises(xds.UsageError, match="must be a torch.optim.Optimizer"):
        engine_of(2, lambda groups: None)
    model = build()
    object_ = torch.optim.SGD(model.parameters(), 0.1)
    settings = config(1, samples=4)
    del settings["optimizer"]
    text = r"ReduceLROnPlateau: its step\(\) needs metrics, which engine.step\(\) does not have"
    for schedule in (plateau, plateau(object_), lambda optimizer: plateau(optimizer)):
        with pytest.raises(xds.UsageError, match=text):
            xds.initialize(build(), settings, optimizer=torch.optim.SGD, lr_scheduler=schedule)
    engine = xds.initialize(model, settings, optimizer=object_)
    with pytest.raises(xds.UsageError, match=text):
        engine.lr_scheduler = plateau(object_)
    own = plateau(engine.optimizer, patience=0)  # the remedy
    trained_lr = engine.get_lr()[0]
    for metric in (1.0, 2.0, 3.0):
        engine.backward(engine(X).square().mean())
        engine.step()
        own.step(metric)
    assert engine.get_lr()[0] < trained_lr and dist.get_world_size() == 2


def test_what_the_engine_cannot_step_is_refused_at_initialize() -> None:
    run_ranks(refusals, 2)
