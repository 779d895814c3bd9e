"""Lists of layers in pipeline stages: tuples, integers and masks flow, weights are tied, lengths change."""

from __future__ import annotations

from typing import Any

import torch
from helpers import run_ranks
from pipeline_runs import VOCAB, batches, config_of, worst
from torch import Tensor, nn

import xds
from xds.pipe.layer_specs import LayerSpec, TiedLayerSpec
from xds.pipe.module import PipelineModule

WIDTH, COUNT, STEPS = 12, 4, 4
Flowing = tuple[Tensor, Tensor, Tensor, Tensor]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


class Start(nn.Module):
    """Adds positions, a mask and a scalar, all without gradients."""

    def forward(self, x: Tensor) -> Flowing:
        positions = torch.arange(x.shape[1]).expand(x.shape[:2])
        return x, positions, torch.ones(x.shape[:2], dtype=torch.bool).tril(), torch.tensor(3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.position = nn.Embedding(64, WIDTH)

    def forward(self, flowing: Flowing) -> Flowing:
        x, positions, mask, factor = flowing
        added = torch.tanh(self.up(x) + self.position(positions) * mask.unsqueeze(-1))
        return x + added * factor / 3, positions + 1, mask.roll(1, -1), factor


class Head(nn.Module):
    """Of another class than `Embedding`, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, flowing: Flowing) -> Tensor:
        return nn.functional.linear(flowing[0], self.weight, self.bias)


def as_head(module: nn.Module, flowing: Flowing) -> Tensor:
    return nn.functional.linear(flowing[0], module.weight)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def layers(kind: str) -> list[Any]:
    """kind: "module" or "weight": what the embedding and the head share; "again": a block is used twice."""
    heads = {
        "module": TiedLayerSpec("tokens", Embedding, forward_fn=as_head),
        "weight": TiedLayerSpec("tokens", Head),
    }
    is_tied = kind in heads
    first = TiedLayerSpec("tokens", Embedding) if is_tied else LayerSpec(Embedding)
    blocks: list[Any] = [LayerSpec(Block) for _ in range(4)]
    if kind == "again":
        blocks[0] = blocks[3] = Block()
    return [first, Start(), *blocks, heads.get(kind, LayerSpec(Head))]


def samples(step: int, data_rank: int, lengths: bool) -> list[tuple[Tensor, Tensor]]:
    found = batches(step, data_rank, COUNT)
    if not lengths:
        return found
    ends = [2 + (step + number) % 4 for number in range(COUNT)]
    return [(x[:, :end], y[:, :end]) for (x, y), end in zip(found, ends, strict=True)]


def train(
    stages: int, kind: str, pipeline: dict[str, Any], stage: int, lengths: bool
) -> list[tuple[float, float]]:
    """Loss and norm of each step on this rank."""
    model = PipelineModule(layers(kind), loss_fn=cross_entropy, seed_layers=True, base_seed=7)
    config = config_of(stages, COUNT, zero={"stage": stage}, pipeline=pipeline)
    engine = xds.initialize(model, config)
    found = []
    for step in range(STEPS):
        loss = engine.train_batch(iter(samples(step, engine.dp_rank, lengths)))
        found.append((loss.item(), engine.get_global_grad_norm()))
    loss = engine.eval_batch(iter(samples(STEPS, engine.dp_rank, lengths)))
    engine.destroy()
    return [*found, (loss.item(), 0.0)]


def check(
    cut: tuple[int, int], kind: str, stage: int, lengths: bool = False, **pipeline: Any
) -> None:
    stages, data = cut
    expected = run_ranks(train, data, 1, kind, {}, 0, lengths)[0]
    by_rank = run_ranks(train, stages * data, stages, kind, pipeline, stage, lengths)
    assert all(found == by_rank[0] for found in by_rank)
    assert worst(by_rank[0], expected) <= 1e-6


def test_a_tied_layer_of_two_stages_on_one_rank() -> None:
    check((2, 1), "module", 1, schedule="zbv")


def test_lengths_change_from_one_micro_batch_to_the_next() -> None:
    check((2, 1), "weight", 3, lengths=True, schedule="1f1b")


def test_a_layer_that_is_used_twice_gets_gradients_from_two_stages_of_one_rank() -> None:
    """It was taken as a block of the first one only."""
    check((2, 1), "again", 3, schedule="dualpipev")
