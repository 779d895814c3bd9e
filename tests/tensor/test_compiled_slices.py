"""Tests of compiled blocks with slices: one graph without a break, and the numbers of eager blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from warm_ranks import warm

import xds

WIDTH, HEAD_DIM, SAMPLES, LENGTH, CLASSES, STEPS = 16, 4, 2, 6, 8, 3
PLAN = {
    **{f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")},
    **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (-1, HEAD_DIM)) for layer in (self.q, self.k, self.v))
        q, k, v = (head.transpose(1, 2) for head in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), torch.arange(SAMPLES * LENGTH) % CLASSES)


def train(section: dict[str, Any] | None, stage: int = 0, dropout: float = 0.0) -> Any:
    """Losses and norms, and how many graphs torch made."""
    torch.manual_seed(3)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"tp_size": 2, "plan": PLAN},
    }
    if section is not None:
        config["compile"] = {"enabled": True, **section}
    engine = xds.initialize(Model(dropout), config)
    found = []
    for step in range(STEPS):
        x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found, counters["stats"]["unique_graphs"]


def refused(*args: Any) -> str:
    with pytest.raises(xds.UsageError) as caught:
        train(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("backend", "stage"),
    [
        ("aot_eager", 0),
        pytest.param("aot_eager", 3, marks=pytest.mark.slow),
        pytest.param("inductor", 0, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_block_is_one_graph_with_the_numbers_of_an_eager_one(backend, stage):
    section = {"backend": backend, "kwargs": {"fullgraph": True}}
    (compiled, graphs), other = warm(2).run(train, section, stage)
    (eager, no_graphs), _ = warm(2).run(train, None, stage)
    assert (compiled, graphs) == other
    assert (graphs, no_graphs) == (
        3,
        0,
    )  # one for each block, and one for the proof in evaluation mode
    assert torch.tensor(compiled).allclose(torch.tensor(eager), rtol=1e-6, atol=0)


def test_dropout_in_a_compiled_block_is_refused():
    for message in warm(2).run(refused, {"backend": "aot_eager"}, 0, 0.1):
        assert "tensor ranks need different random numbers" in message
