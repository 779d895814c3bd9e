"""Features of the engine in pipeline stages equal those without a pipeline; loaders and evaluation."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from helpers import run_ranks
from pipeline_runs import VOCAB, Model, batches, config_of, worst
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import xds

COUNT, STEPS = 4, 4
ON, CPU = {"enabled": True}, {"device": "cpu"}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.01}}


class Plain(nn.Module):
    """Blocks that the model checkpoints itself, with batch normalisation."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        blocks = (nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)
        self.norms = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, VOCAB)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        x = self.norms(x.transpose(1, 2)).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


MODELS = {
    "plain": lambda: Model(8),
    "tied": lambda: Model(8, tied=True),
    "recomputed": lambda: Plain(False),
    "reentrant": lambda: Plain(True),
}


def optimizer(name: str) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-2}}}


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> model, config
    "overlap": ("tied", {"zero": {"stage": 2, "offload_optimizer": CPU | {"overlap_step": True}}}),
    "offload": ("tied", {"zero": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}}),
    "lamb": ("tied", {"zero": {"stage": 3}, **optimizer("Lamb")}),
    "muon": ("tied", {"zero": {"stage": 1}, **optimizer("Muon"), "scheduler": WARMUP}),
    "merged units": ("tied", {"zero": {"stage": 3, "unit_min_numel": 10**9}}),
    "reduce each": ("tied", {"zero": {"stage": 3}, "pipeline": {"reduce": "micro_batch"}}),
    "autocast": ("plain", {"torch_autocast": ON | {"dtype": "bfloat16"}, "zero": {"stage": 2}}),
    "recomputed": ("recomputed", {"zero": {"stage": 3}}),
    "reentrant": ("reentrant", {"zero": {"stage": 1}}),
    "activations on the host": (
        "plain",
        {"activation_checkpointing": ON | {"cpu_checkpointing": True}},
    ),
    "six micro-batches": (
        "plain",
        {"gradient_accumulation_steps": 6, "pipeline": {"dynamic_shape": True}},
    ),
    "compiled, recomputed": ("plain", {"compile": ON, "activation_checkpointing": ON}),
    "bf16 sums": ("plain", {"bf16": ON, "data_types": {"grad_accum_dtype": "bf16"}}),
    "fp32 messages": ("plain", {"bf16": ON, "communication_data_type": "fp32"}),
}


def train(name: str, stages: int, schedule: str) -> list[tuple[float, float]]:
    """Loss and norm of each step on this rank."""
    kind, changes = copy.deepcopy(FEATURES[name])
    pipeline = changes.pop("pipeline", {}) | {"schedule": schedule}
    torch.manual_seed(0)
    model = MODELS[kind]()
    config = config_of(stages, COUNT, pipeline=pipeline if stages > 1 else {}, **changes)
    engine = xds.initialize(model, config)
    found = []
    for step in range(STEPS):
        each = batches(step, engine.dp_rank, engine.gradient_accumulation_steps())
        loss = engine.train_batch(iter(each))
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


def check(name: str, schedule: str, data: int = 2) -> None:
    expected = run_ranks(train, data, name, 1, "1f1b")[0]
    by_rank = run_ranks(train, 2 * data, name, 2, schedule)
    assert all(found == by_rank[0] for found in by_rank)
    assert worst(by_rank[0], expected) <= 1e-6


def test_updates_on_the_host_overlap_the_next_step() -> None:
    check("overlap", "1f1b")


SCHEDULES = ("1f1b", "zbv")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"), list(zip(FEATURES, itertools.cycle(SCHEDULES), strict=False))
)
def test_features_equal_those_without_a_pipeline(name: str, schedule: str) -> None:
    check(name, schedule)


def from_training_data() -> list[Any]:
    """Every stage reads the data; then evaluation with outputs."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (64, 2, 6), generator=torch.Generator().manual_seed(3))
    data = TensorDataset(tokens[:, 0], tokens[:, 1])
    engine = xds.initialize(Model(4), config_of(2, COUNT), training_data=data)
    losses = [engine.train_batch().item() for _ in range(3)]
    sent = engine.bytes_sent()["broadcast"]
    samples = batches(9, engine.dp_rank, 3)
    loss, outputs = engine.eval_batch(iter(samples), 3, return_logits=True)
    count = None if outputs is None else len(outputs)
    engine.destroy()
    return [losses, sent, loss.item(), count]


def test_every_stage_reads_training_data() -> None:
    first, second, third, last = run_ranks(from_training_data, 4)
    assert [one[0] for one in (first, second, third, last)] == [first[0]] * 4
    assert first[2] == last[2]
    assert [one[3] for one in (first, second, third, last)] == [None, None, 3, 3]
