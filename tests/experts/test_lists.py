"""Experts that are the children of an nn.ModuleList: found, proven, and trained as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config
from torch import Tensor, nn

import xds

WIDTH, EXPERTS, STEPS = 16, 4, 3


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 24, bias=False)
        self.w2 = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)))


class MixtralBlock(nn.Module):
    """As transformers had it before version 5."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, hidden_states: Tensor) -> Any:
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        logits = self.gate(hidden_states)
        weights = nn.functional.softmax(logits, dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(hidden_states.dtype)
        final = torch.zeros_like(hidden_states)
        mask = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            idx, top = torch.where(mask[number])
            if len(top):
                final.index_add_(0, top, expert(hidden_states[top]) * weights[top, idx, None])
        return final.view(shape), logits


class Layer(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output = self.mlp(self.norm(x))
        output, logits = output if isinstance(output, tuple) else (output, None)
        return x + output, logits


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = MixtralBlock) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(31, WIDTH)
        self.layers = nn.ModuleList([Layer(block) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x, balance = self.embed(ids), torch.zeros(())
        for layer in self.layers:
            x, logits = layer(x)
            if logits is not None:
                balance = balance + logits.logsumexp(-1).square().mean()
        loss = nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return loss + 0.01 * balance


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 31, (2, 9), generator=generator)


def plain(model: nn.Module, world_size: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses, norms and parameters of one process with the batches of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(STEPS):
        loss = 0.0
        for rank in range(world_size):
            one = model(batch(step, rank)) / world_size
            one.backward()
            loss += one.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss, norm))
    return steps, model.state_dict()


def given(stage: int, size: int, **keys: Any) -> dict[str, Any]:
    section = {"enabled": True, "autoep_size": size, **keys}
    return config(stage, optimizer="SGD", params={"lr": 0.1}, expert_parallel=section)


def trained(make: Any, stage: int, size: int) -> Any:
    engine = xds.initialize(make(), given(stage, size))
    steps = []
    for step in range(STEPS):
        loss = engine(batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        steps.append((loss.item(), engine.get_global_grad_norm()))
    values = engine.state_dict()
    engine.destroy()
    return steps, values


def check(ranks: Any, wanted: Any, params: dict[str, Tensor]) -> None:
    for step, (loss, norm) in enumerate(wanted):
        mean = sum(steps[step][0] for steps, _ in ranks) / len(ranks)
        assert mean == pytest.approx(loss, rel=1e-6)
        assert ranks[-1][0][step][1] == pytest.approx(norm, rel=1e-6)
    assert list(ranks[-1][1]) == list(params)
    for name, value in params.items():
        torch.testing.assert_close(ranks[-1][1][name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world_size", "size"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_equal_to_one_process(world_size: int, size: int, stage: int) -> None:
    check(run_ranks(trained, world_size, Model, stage, size), *plain(Model(), world_size))
