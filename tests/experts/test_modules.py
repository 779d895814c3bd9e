"""Own modules of experts: how they may be called, and what is refused with the name of the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config
from torch import Tensor, nn

import xds

WIDTH, EXPERTS = 8, 4


class Experts(nn.Module):
    """As in docs/experts.md, with other names, dropout and a norm for all experts."""

    _is_expert_parallel = False  # as transformers marks its classes: the names are free

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 6, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 6))
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(index == expert)
            hidden = torch.relu(tokens[token] @ self.up[expert].T) @ self.down[expert].T
            hidden = self.norm(self.dropout(hidden)) * weights[token, choice, None]
            result = result.index_add(0, token, hidden.to(result.dtype))
        return result


class Otherwise(Experts):
    _is_expert_parallel = property()  # hasattr is False

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return tokens


class WithTable(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(EXPERTS))


class WithMask(Experts):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor, mask: Any = None) -> Tensor:
        return super().forward(tokens, index, weights)


class Model(nn.Module):
    """Its weights have another dtype than its tokens, and its numbers are int32."""

    def __init__(self, experts: type[Experts], dropout: float = 0.0, **given: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = experts()
        self.experts.dropout.p = dropout
        self.given = given

    def forward(self, values: Tensor) -> Tensor:
        scores = self.router(values).double().softmax(-1)
        weights, index = scores.topk(2)
        output: Tensor = self.experts(values, weights=weights, index=index.int(), **self.given)
        return (output + values).square().mean()


def values(step: int, rank: int) -> Tensor:
    return torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model: Any, stage: int = 2, **sections: Any) -> Any:
    sections["expert_parallel"] = {"enabled": True, "autoep_size": 2}
    given = config(stage, optimizer="SGD", params={"lr": 0.1}, **sections)
    engine = xds.initialize(model(), given)
    found = []
    for step in range(3):
        loss = engine(values(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    return found, engine.state_dict()


def whole() -> Model:
    return Model(Experts)


def dropping() -> Model:
    return Model(Experts, 0.5)


def frozen() -> Model:
    model = Model(Experts)
    model.experts.up.requires_grad_(False)
    return model


@pytest.mark.parametrize(("build", "stage"), [(whole, 2), (whole, 3), (frozen, 3)])
def test_keywords_numbers_and_a_norm_of_all_experts(build: Any, stage: int) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for step in range(3):
        losses = [model(values(step, rank)) / 2 for rank in range(2)]
        sum(losses).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append((sum(losses).item(), norm))
    ranks = run_ranks(trained, 2, build, stage)
    for step, (loss, norm) in enumerate(wanted):
        assert sum(curve[step][0] for curve, _ in ranks) / 2 == pytest.approx(loss, rel=1e-6)
        assert ranks[1][0][step][1] == pytest.approx(norm, rel=1e-6)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(ranks[1][1][key], value, rtol=1e-5, atol=1e-7)


def autocast(model: Any) -> Any:
    return trained(model, torch_autocast={"enabled": True, "dtype": "bfloat16"})


@pytest.mark.parametrize("train", [trained, autocast])
def test_dropout_and_autocast_are_no_other_sum(train: Any) -> None:
    for curve, _ in run_ranks(train, 2, dropping):
        assert all(0 < loss < 100 for loss, _ in curve)


def otherwise() -> Model:
    return Model(Otherwise)


def with_table() -> Model:
    return Model(WithTable)


def with_mask() -> Model:
    return Model(WithMask, mask=1)


def without() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH))


class Modal(nn.Module):
    """As a model that has experts for images alone, and rank 1 has no image."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Model(Experts), Model(Experts)

    def forward(self, values: Tensor) -> Tensor:
        loss: Tensor = self.text(values) if dist.get_rank() else self.image(values)
        return loss


def test_ranks_that_call_different_experts_stop() -> None:
    sentences = run_ranks(refused, 2, Modal)
    for name, sentence in zip(("image", "text"), sentences, strict=True):
        assert f"this rank calls {name}.experts while another one calls other experts" in sentence


REFUSED = {
    otherwise: r"experts \(Otherwise\) is not called with .*, and the model has no other experts",
    with_table: r"experts \(WithTable\) has scale with a row for each expert",
    with_mask: r"experts is called with \[7, 8\], \[7, 2\], \[7, 2\], int, and needs",
    without: "the model has no module of experts",
}


def refused(model: Any) -> str:
    with pytest.raises(xds.UsageError) as caught:
        trained(model)
    return str(caught.value)


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.__name__)
def test_what_is_called_otherwise_is_refused_on_every_rank(model: Any) -> None:
    sentences = run_ranks(refused, 2, model)
    assert len(set(sentences)) == 1
    with pytest.raises(xds.UsageError, match=REFUSED[model]):
        raise xds.UsageError(sentences[0])
