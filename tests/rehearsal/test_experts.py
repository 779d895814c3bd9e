"""Experts on two ranks on a CUDA device that is host memory: numbers, and the only waits of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import ranks
from helpers import run_ranks
from test_rehearsal import config_of, near, waits
from torch import Tensor, nn

pytestmark = pytest.mark.slow  # by default test_rehearsal.py runs
LAYERS, STEPS = 2, 4


class Experts(nn.Module):
    """Stacked matrices, multiplied without a wait of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 24, 24) / 5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weight = self.up[top_k_index]  # [T, K, C, C]
        outputs = (weight @ hidden_states[:, None, :, None]).squeeze(-1).tanh()
        return (outputs * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(24, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2, dim=-1)
        return x + self.experts(x, index, weights)


def trained(precision: str, size: int) -> Any:
    import xds

    torch.manual_seed(3)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    more = {"expert_parallel": {"enabled": True, "autoep_size": size}} if size else {}
    engine = xds.initialize(model, config_of(2, precision, 1) | more)
    dtype, losses, waited = next(engine.module.parameters()).dtype, [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(6, 24, generator=generator).to(engine.device, dtype)
        before = sum(waits().values())
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        waited.append(sum(waits().values()) - before)
        engine.step()
        losses.append(loss.detach())
    found = [loss.item() for loss in losses]
    engine.destroy()
    return found, waited[-1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_on_a_device(precision: str) -> None:
    on_cpus = [losses for losses, _ in run_ranks(trained, 2, precision, 2)]
    own = ranks(2, kernels=False).run(trained, precision, 0)
    for rank, (losses, waited) in enumerate(ranks(2, kernels=False).run(trained, precision, 2)):
        assert losses == pytest.approx(on_cpus[rank], **near(precision))
        # the counts of rows and pairs, once in each layer
        assert waited - own[rank][1] == LAYERS
