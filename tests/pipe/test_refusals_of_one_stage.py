"""What one pipeline stage refuses, all ranks refuse at once, and say which rank it was and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import Tensor, nn

import xds


class Net(nn.Module):
    """Two blocks between an embedding, which is on the first stage, and a head, on the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 20, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Broken(nn.Module):
    """A layer that cannot be built."""

    def __init__(self) -> None:
        super().__init__()
        if not torch.empty(0).is_meta:  # only its own stage builds it
            raise ValueError("no such layer")


def model_of(kind: str) -> nn.Module:
    if kind == "layer":
        from xds.pipe import LayerSpec, PipelineModule

        layers = [LayerSpec(nn.Linear, 8, 8), LayerSpec(Broken)]
        return PipelineModule(layers, loss_fn=nn.MSELoss(), partition_method="uniform")
    model: Any = Net()
    if kind == "max_norm":
        model.embed.max_norm = 1.0
    elif kind == "complex":
        model.blocks[1].phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    elif kind == "tiles":
        model.blocks[0].mlp = nn.Linear(8, 8)
    return model


def refused(kind: str) -> tuple[str, str]:
    """The class and the text of this rank's error."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 1, "shared_parameters": kind == "max_norm"},
        "pipeline": {"stages": 2},
    }
    if kind == "tiles":
        config["sequence"] = {"tiled_mlp": 4}
    try:
        xds.initialize(model_of(kind), config)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("kind", "rank", "name", "text"),
    [
        ("max_norm", 0, "UsageError", "max_norm of embed"),
        ("complex", 1, "UsageError", "complex parameters are not supported"),
        ("tiles", 1, "UsageError", "has no module called mlp"),
        ("layer", 1, "ValueError", "no such layer"),
    ],
)
def test_a_refusal_reaches_the_other_stages(kind: str, rank: int, name: str, text: str) -> None:
    found = run_ranks(refused, 2, kind)
    assert found[rank][0] == name and text in found[rank][1]
    kind_of_other, said = found[1 - rank]
    assert kind_of_other == "UsageError"
    assert f"xds.initialize failed on rank {rank}: " in said and text in said
