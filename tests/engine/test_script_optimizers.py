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
from torch.nn.utils import clip_grad_norm_

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


# -- what a class gets does not depend on how it is given ------------------------------------------------


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


# -- what the engine cannot step -------------------------------------------------------------------------


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


# -- optimizers that evaluate other values than they train -----------------------------------------------


class Averaging(torch.optim.Optimizer):
    """SGD that keeps a mean of the weights, and swaps it in."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
                self.state[p].setdefault("mean", p.detach().clone()).lerp_(p, 0.5)

    def swap(self) -> None:
        for p in self.param_groups[0]["params"]:
            kept = p.data.clone()
            p.data.copy_(self.state[p]["mean"])  # moves no version counter
            self.state[p]["mean"].copy_(kept)

    eval = train = swap


def modes(stage: int, precision: str, offloads: bool) -> None:
    zero = {"stage3_param_persistence_threshold": 0}
    zero |= {"offload_optimizer": {"device": "cpu"}} if offloads else {}
    plain_model, model = build(), build()
    reference, given = Averaging(plain_model.parameters()), Averaging(model.parameters())
    engine = engine_of(
        stage, given, model, precision=precision, zero=zero, zero_allow_untested_optimizer=True
    )
    dtype = next(engine.module.parameters()).dtype
    exact = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}

    def train() -> None:
        for _ in range(3):
            reference.zero_grad()
            plain_model(X).square().mean().backward()
            reference.step()
            engine.backward(engine(X.to(dtype)).float().square().mean())
            engine.step()

    train()
    masters = engine.full_state_dict(rank0_only=False, full_precision=True)
    reference.eval(), given.eval()
    with torch.no_grad():
        seen = engine(X.to(dtype)).float()
    torch.testing.assert_close(seen, plain_model(X).detach(), **exact)
    reference.train(), given.train()
    again = engine.full_state_dict(rank0_only=False, full_precision=True)
    assert all(value.equal(masters[name]) for name, value in again.items())
    train()
    torch.testing.assert_close(
        engine(X.to(dtype)).float().detach(), plain_model(X).detach(), **exact
    )
    engine.destroy()
    assert not {"eval", "train"} & vars(given).keys()


def in_every_mode() -> None:
    for stage in (0, 1, 2, 3):
        for precision in ("fp32", "bf16"):
            modes(stage, precision, offloads=False)
    modes(2, "bf16", offloads=True)


def test_an_optimizer_that_swaps_weights_gives_them_to_the_model_of_every_rank() -> None:
    run_ranks(in_every_mode, 2)


# -- torch's functions that clip -------------------------------------------------------------------------


def clipped(stage: int, precision: str, limit: float, config_limit: float) -> None:
    """As plain torch: SGD of gradients near 100."""
    more = {"clip": config_limit} if config_limit else {}
    engine, model = (
        engine_of(stage, functools.partial(torch.optim.SGD, lr=1.0), precision=precision, **more),
        build(),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dtype = next(engine.module.parameters()).dtype
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for _ in range(2):
        engine.backward(100 * engine(X.to(dtype)).float().square().mean())
        norm = clip_grad_norm_(engine.module.parameters(), limit)
        engine.step()
        optimizer.zero_grad()
        (100 * model(X).square().mean()).backward()
        wanted = clip_grad_norm_(model.parameters(), limit)
        if config_limit:
            clip_grad_norm_(model.parameters(), config_limit)
        optimizer.step()
        torch.testing.assert_close(
            norm, wanted, rtol=3e-2 if dtype != torch.float32 else 1e-5, atol=0
        )
    found = engine.full_state_dict(rank0_only=False, full_precision=True)
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), **close)
    engine.destroy()


def clipping() -> None:
    for stage in (0, 1, 2, 3):
        clipped(stage, "fp32", 0.1, 0.0)
    clipped(2, "bf16", 0.1, 0.0)
    clipped(2, "fp32", 0.5, 0.1)
    clipped(3, "fp32", 1e6, 0.0)
    for stage in (1, 3):
        refused_clipping(stage)


def refused_clipping(stage: int) -> None:
    engine = engine_of(stage, torch.optim.SGD, accumulation=2)
    params = list(engine.module.parameters())
    assert clip_grad_norm_(params, 1.0) == 0  # nothing to clip
    engine.backward(engine(X).square().mean())
    with pytest.raises(xds.UsageError, match="between micro-batches of a step"):
        clip_grad_norm_(params, 1.0)
    engine.step()
    engine(X).square().mean().backward()  # the script's own
    other = nn.Linear(2, 1)
    other(torch.ones(2)).sum().backward()
    for call, text in (
        (lambda: clip_grad_norm_(params[:2], 1.0), "of a part of an engine's parameters"),
        (lambda: clip_grad_norm_([*params, *other.parameters()], 1.0), "of others beside them"),
        (lambda: clip_grad_norm_(params, 1.0, norm_type=1), "clips by their 2-norm"),
        (lambda: clip_grad_norm_(params, 0.0), "max_norm = 0.0: must be a number above 0"),
        (lambda: nn.utils.clip_grad_value_(params, 1.0), "clip_grad_value_ between backward"),
        (
            lambda: nn.utils.clip_grads_with_norm_(params, 1.0, torch.ones(())),
            "clip_grads_with_norm_ between backward",
        ),
    ):
        with pytest.raises(xds.UsageError, match=text):
            call()
    norm = nn.utils.clip_grad_norm_(iter(params), 1e-3)
    assert clip_grad_norm_(other.parameters(), 1.0) > 1.7  # torch's own
    nn.utils.clip_grad_value_(other.parameters(), 0.1)
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(norm.item())
    engine.backward(engine(X).square().mean() * torch.nan)
    engine.step()
    engine.backward(engine(X).square().mean() * torch.nan)
    with pytest.raises(xds.XdsError, match="error_if_nonfinite=True.* is nan"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    engine.destroy()


def test_torchs_clipping_clips_the_step_or_is_refused() -> None:
    run_ranks(clipping, 2)
    own = clip_grad_norm_.__closure__[0].cell_contents
    assert own.__module__ == "torch.nn.utils.clip_grad"
