"""Compiled blocks with slices: one graph without a break, and the numbers of eager blocks."""

from __future__ import annotations

from typing import Any

import pytest
import runs
import torch
import torch.nn.functional as F
from helpers import run_processes
from torch import Tensor, nn

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
    tensor = {"tp_size": 2, "plan": PLAN}
    config = runs.config(stage, params={"eps": 1e-2}, tensor_parallel=tensor)
    if section is not None:
        config["compile"] = {"enabled": True, **section}
    engine = xds.initialize(Model(dropout), config)
    shape = (SAMPLES, LENGTH, WIDTH)
    found = runs.train(
        engine,
        STEPS,
        lambda step, _: torch.randn(shape, generator=torch.Generator().manual_seed(step)),
    )
    engine.destroy()
    return found, counters["stats"]["unique_graphs"]


def refused(*args: Any) -> str:
    with pytest.raises(xds.UsageError) as caught:
        train(*args)
    return str(caught.value)


@pytest.mark.slow
def test_a_compiled_block_is_one_graph_with_the_numbers_of_an_eager_one() -> None:
    section = {"backend": "aot_eager", "kwargs": {"fullgraph": True}}
    (compiled, graphs), other = run_processes(train, 2, section, 3)
    (eager, no_graphs), _ = run_processes(train, 2, None, 3)
    assert (compiled, graphs) == other
    # one for each block, and one for the proof in evaluation mode
    assert (graphs, no_graphs) == (3, 0)
    assert torch.tensor(compiled).allclose(torch.tensor(eager), rtol=1e-6, atol=0)


def test_dropout_in_a_compiled_block_is_refused() -> None:
    for message in run_processes(refused, 2, {"backend": "aot_eager"}, 0, 0.1):
        assert "tensor ranks need different random numbers" in message
