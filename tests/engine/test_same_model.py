"""Ranks with different configs or models get one short sentence about the first difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from warm_ranks import warm

import xds


def message(by_rank: list[dict[str, Any]], frozen_on_rank_1: bool) -> str:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(not (frozen_on_rank_1 and rank == 1))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": by_rank[rank],
    }
    with pytest.raises(xds.UsageError) as caught:
        xds.initialize(model, config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("by_rank", "found"),
    [
        (
            [{"stage": 1}, {"stage": 2}],
            "stage = 2 on rank 1, zero_optimization.stage = 1 on rank 0",
        ),
        (
            [{"stage": 1}, {"stage": 1, "offload_optimizer": {"device": "cpu"}}],
            "zero_optimization.offload_optimizer",
        ),
    ],
)
def test_a_setting_that_differs_is_shown_without_its_section(
    by_rank: list[dict[str, Any]], found: str
) -> None:
    for said in warm(2).run(message, by_rank, False):
        assert said.startswith("rank 1 has another config than rank 0: zero_optimization.")
        assert found in said and len(said) < 300


def test_a_frozen_parameter_is_named() -> None:
    for said in warm(2).run(message, [{"stage": 1}] * 2, True):
        assert (
            "another model than rank 0: parameter 1.weight float32[4, 4] (frozen) on rank 1" in said
        )
