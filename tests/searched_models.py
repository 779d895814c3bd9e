"""A tiny model and a machine for searches of layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from xds.engine.planning.machine import Machine, parse_machine
from xds.engine.planning.models import ModelSource, ResizedBatches

DATA: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


class Source(ModelSource):
    name = "tiny"

    def build(self) -> nn.Module:
        blocks = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))
        return Model(nn.ModuleList(blocks))

    def batch(self, micro_batch_size: int) -> Any:
        return torch.zeros(3, 64)


class Model(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def both() -> tuple[nn.Module, Any]:
    source = Source()
    return source.build(), source.batch(3)


def machine(device_bytes: float = 1e9) -> Machine:
    def table(*point: float) -> dict[str, Any]:
        return {"points": [point], "source": "test"}

    def number(value: float) -> dict[str, Any]:
        return {"value": value, "source": "test"}

    link = {"latency": table(2, 1e-5), "rate": table(2, 1e6, 1e9)}
    return parse_machine(
        {
            "name": "test",
            "device": "cuda",
            "devices_per_host": 2,
            "date": "2026-11-29",
            "device_bytes": number(device_bytes),
            "host_bytes": number(1e12),
            "matrix": {"fp32": table(64, 64, 64, 1e9)},
            "memory": table(1e6, 1e9),
            "launch": number(1e-6),
            "update": number(1e9),
            "to_host": number(1e9),
            "to_device": number(1e9),
            "links": {"host": {"any": link}, "hosts": {"any": link}},
        }
    )


SOURCE = ResizedBatches(Source())
