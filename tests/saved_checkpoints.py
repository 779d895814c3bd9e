"""Test helper: a small model with unusual parameter names, saved by real ranks, and its expected contents."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from runs import config
from torch import Tensor, nn
from torch.nn import functional as F

import xds
from xds.zero.checkpoint.snapshot import StateBlock

WIDTH = 9


class Net(nn.Module):
    """Tied, frozen, empty and unlike parameters, buffers of two dtypes. Returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.BatchNorm1d(3 * WIDTH)
        self.outer = nn.Linear(3 * WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.again = nn.Linear(WIDTH, 3 * WIDTH)
        self.again.weight = self.inner.weight
        self.empty = nn.Parameter(torch.empty(0))
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.inner.weight.dtype)
        x = self.outer(F.gelu(self.norm(self.inner(x))) + self.again(self.frozen(x)))
        return (self.gain * x).float().square().mean()


def engine_of(stage: int, precision: str = "fp32", model: nn.Module | None = None) -> Any:
    torch.manual_seed(stage)
    settings = config(stage, precision, samples=4, params={"weight_decay": 0.1})
    return xds.initialize(model or Net(), settings)


def train(engine: Any, steps: int, width: int = WIDTH) -> None:
    for number in range(steps):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        engine.backward(engine(torch.randn(4, width, generator=generator)))
        engine.step()


def moments(engine: Any) -> dict[str, Tensor]:
    """The whole first moment of each parameter that trains."""
    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad and param.numel():
            value = xds.zero.get_full_optimizer_state(param, "exp_avg")
            found[name] = value.view(param.shape)
    return found


def save(folder: str, stage: int, precision: str, **more: Any) -> tuple[Any, Any]:
    """Train two steps and save; the whole fp32 state dict (on rank 0) and the first moments."""
    engine = engine_of(stage, precision)
    train(engine, 2)
    engine.save_checkpoint(folder, client_state={"note": "mine", "t": torch.arange(3)}, **more)
    return engine.full_state_dict(full_precision=True), moments(engine)


def save_each(folder: str, cases: list[tuple[int, str]]) -> list[Any]:
    return [save(f"{folder}/{stage}-{precision}", stage, precision) for stage, precision in cases]


def values_of(block: StateBlock) -> Tensor:
    """The values of a block of a `Snapshot`, [n], also of one that has no tensor of them, such as halves."""
    if block.blocks is None:
        return block.tensor.detach().reshape(-1)
    return torch.cat([part.clone() for part in block.blocks(0, block.tensor.numel())])
