"""Modules of experts that would train with other numbers on several ranks are refused, each by its sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import run_ranks
from runs import config
from torch import Tensor, nn
from torch.nn import functional as F

import xds

WIDTH, EXPERTS = 8, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def hidden(self, tokens: Tensor, expert: int) -> Tensor:
        return tokens @ self.up[expert]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            hidden = self.hidden(hidden_states[token], expert)[: len(token)]
            token, choice = token[: len(hidden)], choice[: len(hidden)]
            result = result.index_add(0, token, hidden * top_k_weights[token, choice, None])
        return result


class WithCapacity(Experts):
    def hidden(self, tokens: Tensor, expert: int) -> Tensor:
        return super().hidden(tokens[: 2 + len(tokens) // self.num_experts], expert)


class WithBatchNorm(Experts):
    def hidden(self, tokens: Tensor, expert: int) -> Tensor:
        return F.normalize(super().hidden(tokens, expert), dim=0)


class WithNumbers(Experts):
    def hidden(self, tokens: Tensor, expert: int) -> Tensor:
        return super().hidden(tokens, expert) * (expert + 1)


class WithLoss(Experts):
    def hidden(self, tokens: Tensor, expert: int) -> Tensor:
        self.loss = tokens.square().mean()
        return super().hidden(tokens, expert)


class Listed(nn.Module):
    """A block; its experts may have a state."""

    def __init__(self, *after: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), *(make() for make in after))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(index == number)
            if len(token):
                result = result.index_add(0, token, expert(x[token]) * weights[token, choice, None])
        return result


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.tokens += len(x)
        return x


class Model(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        output: Tensor = self.experts(x, index, weights)
        return output


def tied_router() -> nn.Module:
    model = Model(Experts())
    model.experts.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
    model.router.weight = model.experts.bias
    return model


def tied_stacks() -> nn.Module:
    model = nn.Sequential(Model(Experts()), Model(Experts()))
    model[1].experts.up = model[0].experts.up
    return model


def tied_lists() -> nn.Module:
    model = nn.Sequential(Listed(), Listed())
    model[1].experts[0][0].weight = model[0].experts[0][0].weight
    return model


def tied_outside() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Listed())
    model[0].weight = model[1].experts[0][0].weight
    return model


def tied_experts() -> nn.Module:
    model = nn.Sequential(Listed(), Listed())
    model[1].experts[0] = model[0].experts[3]
    return model


def computed() -> nn.Module:
    model = Model(Experts())
    nn.utils.parametrizations.weight_norm(model.experts, "up", dim=0)
    return model


SUM = "is not the weighted sum of its experts"
CASES: dict[str, tuple[Any, str]] = {
    "capacity": (lambda: Model(WithCapacity()), SUM),
    "batch": (lambda: Model(WithBatchNorm()), SUM),
    "number": (lambda: Model(WithNumbers()), SUM),
    "loss": (lambda: Model(WithLoss()), "its forward writes self.loss of WithLoss"),
    "count": (lambda: Listed(Count), "its forward writes self.tokens of Count"),
    "statistics": (lambda: Listed(lambda: nn.BatchNorm1d(WIDTH)), "of BatchNorm1d"),
    "router": (tied_router, "router.weight and experts.bias are one parameter"),
    "stacks": (tied_stacks, "0.experts.up and 1.experts.up are one parameter"),
    "lists": (tied_lists, "0.experts.0.0.weight and 1.experts.0.0.weight are one parameter"),
    "experts": (tied_experts, "0.experts.3.0.weight and 1.experts.0.0.weight are one parameter"),
    "outside": (tied_outside, "0.weight and 1.experts.0.0.weight are one parameter"),
    "computed": (computed, "experts (ParametrizedExperts) has parametrizations"),
}


def start(name: str) -> str:
    torch.manual_seed(0)
    section = {"enabled": True, "autoep_size": EXPERTS if name == "number" else 2}
    with pytest.raises(xds.UsageError) as caught:
        engine = xds.initialize(CASES[name][0](), config(2, expert_parallel=section))
        engine(torch.randn(6, WIDTH))
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_refused_on_every_rank(name: str) -> None:
    for text in run_ranks(start, EXPERTS if name == "number" else 2, name):
        assert CASES[name][1] in text and text.count("\n") <= 1, text


def call_twice() -> None:
    engine = xds.initialize(
        Model(WithCapacity()), config(2, expert_parallel={"enabled": True, "autoep_size": 2})
    )
    for _ in range(2):
        with pytest.raises(xds.UsageError, match=SUM):
            engine(torch.randn(6, WIDTH))


def test_what_was_refused_is_refused_again() -> None:
    run_ranks(call_twice, 2)


def call_after_destroy(make: Callable[[], nn.Module]) -> tuple[str, Tensor]:
    torch.manual_seed(0)
    model = make()
    engine = xds.initialize(model, config(2, expert_parallel={"enabled": True, "autoep_size": 2}))
    wanted = engine(torch.ones(6, WIDTH)).detach()
    values = engine.state_dict()
    engine.destroy()
    with pytest.raises(xds.UsageError) as caught:
        model(torch.ones(6, WIDTH))
    other = make()
    other.load_state_dict(values)
    return str(caught.value), (other(torch.ones(6, WIDTH)) - wanted).abs().max()


@pytest.mark.parametrize("make", [Listed, lambda: Model(Experts())])
def test_a_part_of_the_experts_is_not_called_after_the_engine(make: Any) -> None:
    for text, difference in run_ranks(call_after_destroy, 2, make):
        assert "has this rank's experts only" in text
        assert difference < 1e-6
