"""Inputs of recomputed blocks in parts: numbers, bytes that are sent, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_cases import Case, batches, build
from warm_ranks import warm

import xds
from xds.engine.config.config import Config
from xds.tensor import partition

RECOMPUTED = {"enabled": True}
PARTED = {"enabled": True, "partition_activations": True}


def train(case: Case, section: dict[str, Any]) -> tuple[list[Any], int, list[int]]:
    """Loss and norm of each step, bytes of gathers in the last one, elements of the parts that are kept."""
    plain, partition.MIN_NUMEL = partition.MIN_NUMEL, 1
    kept: list[int] = []
    cut = partition._Part.__init__

    def noted(self: Any, shape: torch.Size, values: torch.Tensor) -> None:
        kept.append(values.numel())
        cut(self, shape, values)

    partition._Part.__init__ = noted  # type: ignore[method-assign]
    try:
        engine = xds.initialize(
            build(case.model), case.config() | {"activation_checkpointing": section}
        )
        found = []
        for step in range(3):
            del kept[:]
            before = engine.bytes_sent().get(partition.KIND, 0)
            loss = engine.train_batch(batches(case.model, step, engine.dp_rank))
            sent = engine.bytes_sent().get(partition.KIND, 0) - before
            found.append((loss.item(), engine.get_global_grad_norm()))
        engine.destroy()
    finally:
        partition.MIN_NUMEL = plain
        partition._Part.__init__ = cut  # type: ignore[method-assign]
    return found, sent, kept


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", 1, 1, 1, 2, 1),
        pytest.param(Case("llama", 1, 2, 1, 2, 3), marks=pytest.mark.slow),
        pytest.param(Case("gpt", 2, 1, 1, 2, 1), marks=pytest.mark.slow),
    ],
    ids=lambda case: case.name,
)
def test_parts_change_no_number_and_are_a_share(case: Case) -> None:
    whole = warm(case.mesh.size).run(train, case, RECOMPUTED)
    parts = warm(case.mesh.size).run(train, case, PARTED)
    for (steps, none, _), (found, sent, kept) in zip(whole, parts, strict=True):
        assert found == steps and none == 0
        numel = 2 * 12 * 32  # of the input of a block: samples, tokens, width
        assert set(kept) == {numel // 2}
        # each part goes to the other rank, in 4 bytes
        assert sent == 4 * sum(kept)


def test_parts_that_go_to_the_host_are_refused() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "tensor_parallel": {"tp_size": 2},
        "activation_checkpointing": PARTED | {"cpu_checkpointing": True},
    }
    with pytest.raises(xds.ConfigError, match="with cpu_checkpointing .* not supported yet"):
        Config.load(config)
    Config.load(config | {"tensor_parallel": {"tp_size": 1}})
