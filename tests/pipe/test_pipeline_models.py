"""Models of transformers in pipeline stages, cut as they are: five steps equal those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers import run_ranks
from pipeline_runs import config_of, worst
from real_models import LENGTH, build
from torch import Tensor, nn

import xds

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

STEPS, COUNT, SAMPLES, VOCAB = 4, 4, 2, 61
# With eps 1e-8 a weight whose gradient is rounding noise moves by the whole lr: a change of 1e-7 in Mixtral's
# weights then changes its norm by 5e-3 after four steps, in one process too.
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-3}


def dict_batches(step: int, data_rank: int) -> list[dict[str, Tensor]]:
    """Every other micro-batch is padded at the end of a sample: for the rest models make no mask."""
    generator = torch.Generator().manual_seed(50 * step + data_rank)
    found = []
    for at in range(COUNT):
        ids = torch.randint(3, VOCAB, (SAMPLES, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        if (step + at) % 2:
            mask[0, LENGTH - 3 :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        found.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return found


def train(name: str, config: dict[str, Any], given: str) -> list[tuple[float, float]]:
    """On each rank. given: "all": every rank passes an iterator; "first": the first stage alone."""
    engine = xds.initialize(build(name), config)
    found = []
    for step in range(STEPS):
        iterator = iter(dict_batches(step, engine.dp_rank))
        is_first = engine.global_rank < engine.dp_world_size
        loss = engine.train_batch(iterator if is_first or given == "all" else None)
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


@cache
def one_process(name: str, data: int) -> list[tuple[float, float]]:
    model: nn.Module = build(name)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, **ADAMW)
    found = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(data):
            for batch in dict_batches(step, rank):
                loss = model(**batch).loss / (COUNT * data)
                loss.backward()
                total += loss.item()
        norm = nn.utils.clip_grad_norm_(params, float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm.item()))
    return found


@pytest.mark.parametrize(
    ("name", "schedule", "given"), [("gpt2", "1f1b", "first"), ("mixtral", "zbv", "all")]
)
def test_models_with_padded_batches_equal_one_process(name: str, schedule: str, given: str) -> None:
    chunks = {"partition": "best"} if schedule == "zbv" else {"partition": [0, 2, 3]}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = config_of(2, COUNT, zero=zero, pipeline={"schedule": schedule, **chunks})
    config["optimizer"] = {"type": "AdamW", "params": ADAMW}
    by_rank = run_ranks(train, 2, name, config, given)
    assert all(found == by_rank[0] for found in by_rank)
    assert worst(by_rank[0], one_process(name, 1)) <= 5e-6
