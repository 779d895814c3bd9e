"""Test of sliced layers against DTensor: outputs, input gradients and norms of a few steps are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from warm_ranks import warm

import xds

STEPS = 3
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-3}
COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")
Found = tuple[torch.Tensor, torch.Tensor, float]


class Block(nn.Module):
    """Attention of four heads and an MLP, with or without biases."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.head_dim = 4
        self.norm = nn.LayerNorm(16)
        for name in ("q", "k", "v", "out"):
            setattr(self, name, nn.Linear(16, 16, bias))
        self.up, self.down = nn.Linear(16, 64, bias), nn.Linear(64, 16, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def build(bias: bool) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Block(bias), Block(bias))


def inputs(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 6, 16, generator=generator).requires_grad_()


def sliced(tensor: int, bias: bool) -> list[Found]:
    words = {f"*.{name}": "colwise" for name in COLUMNS} | {f"*.{name}": "rowwise" for name in ROWS}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "tensor_parallel": {"tp_size": tensor, "plan": words},
    }
    engine = xds.initialize(build(bias), config)
    found = []
    for step in range(STEPS):
        x = inputs(step)
        y = engine(x)
        engine.backward(y.square().mean())
        engine.step()
        assert x.grad is not None
        found.append((y.detach(), x.grad, engine.get_global_grad_norm()))
    engine.destroy()
    return found


def dtensor(tensor: int, bias: bool) -> list[Found]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = build(bias)
    mesh = init_device_mesh("cpu", (tensor,))
    plan = {name: ColwiseParallel() for name in COLUMNS} | {
        name: RowwiseParallel() for name in ROWS
    }
    for block in model:
        parallelize_module(block, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **ADAMW)
    found = []
    for step in range(STEPS):
        x = inputs(step)
        y = model(x)
        y.square().mean().backward()
        grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        norm = torch.stack([grad.norm() for grad in grads]).norm().item()
        found.append((y.detach(), x.grad, norm))
    return found


@pytest.mark.parametrize(
    ("tensor", "bias"),
    [(2, True), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((2, False), (4, True)))],
)
def test_slices_equal_dtensor(tensor: int, bias: bool) -> None:
    ours, theirs = warm(tensor).run(sliced, tensor, bias), warm(tensor).run(dtensor, tensor, bias)
    for own, other in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(own[:2], other[:2], rtol=1e-5, atol=1e-6)
        assert own[2] == pytest.approx(other[2], rel=1e-5)
