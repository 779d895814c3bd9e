"""One-bit optimizers where a rank has only padding, and so no states of the optimizer in a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from warm_ranks import warm

import xds

BEFORE, AFTER = 7, 6  # steps before and after the save


class Few(nn.Module):
    """Three elements, whose gradient is the input: they are all in the shard of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        return (self.weight * (1 + torch.rand(3, generator=generator))).sum()


def train(kind: str, stage: int, freeze_step: int | str, folder: str) -> Any:
    """The parameter after each step, and whether the variance was frozen. folder: resumes there, or ""."""

    def build() -> xds.Engine:
        params = {"lr": 1e-2, "betas": [0.9, 0.5], "freeze_step": freeze_step}
        return xds.initialize(
            Few(),
            {
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": kind, "params": params},
                "zero_optimization": {"stage": stage},
            },
        )

    engine, found = build(), []
    for step in range(BEFORE + AFTER):
        if step == BEFORE and folder:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = build()
            engine.load_checkpoint(folder)
        engine.backward(engine(step))
        engine.step()
        found.append((engine.module.weight.detach().clone(), engine.optimizer.is_frozen))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("kind", "freeze_step"),
    [
        ("OneBitAdam", 3),
        ("OneBitAdam", "auto"),
        ("OneBitLamb", 3),
        ("OneBitLamb", 9),
    ],
)
def test_a_rank_of_padding_knows_the_step(
    kind: str, stage: int, freeze_step: int | str, tmp_path: Any
) -> None:
    whole = warm(2).run(train, kind, stage, freeze_step, "")
    resumed = warm(2).run(train, kind, stage, freeze_step, str(tmp_path))
    assert whole[0][-1][1]
    for found in (*whole, *resumed):
        for (value, is_frozen), (expected, was_frozen) in zip(found, whole[0], strict=True):
            assert value.equal(expected) and is_frozen == was_frozen
