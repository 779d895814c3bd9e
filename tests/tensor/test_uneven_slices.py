"""Tests of what all ranks decide alike where their slices have different sizes, or they run different numbers
of forwards."""

from __future__ import annotations

from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from helpers import run_ranks
from pipeline_runs import SAME, worst
from torch import nn

import xds
from xds.ops.comm.opening import open_collectives
from xds.tensor import compiled
from xds.tensor.exchange import Exchange

pytest.importorskip("transformers", reason="pip install -e '.[test]'")

HEADS = 3  # two tensor ranks have 2 and 1


def build() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    sizes = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=32))


def config_of(stage: int, **zero: Any) -> dict[str, Any]:
    how = {"optimizer": "SGD", "params": {"lr": 0.1}}
    return runs.config(stage, **how, zero=zero, tensor_parallel={"tp_size": 2})


def batch_of(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def train(config: dict[str, Any]) -> tuple[list[runs.Step], list[str]]:
    engine = xds.initialize(build(), config)
    steps = runs.train(engine, 3, lambda step, _: batch_of(step), lambda output: output.loss)
    names = [unit.name for unit in engine._sharded.units]
    engine.destroy()
    return steps, names


def alone() -> list[runs.Step]:
    how = {"optimizer": "SGD", "lr": 0.1}
    return runs.plain(build(), 3, lambda step: [batch_of(step)], lambda output: output.loss, **how)


# a block has 2,736 and 1,392 elements on the two ranks
CASES: list[tuple[int, dict[str, int]]] = [
    (0, {"unit_min_numel": 2200}),
    (3, {"unit_min_numel": 2200}),
    (3, {"stage3_param_persistence_threshold": 2200}),
    (3, {"stage3_prefetch_bucket_size": 2200}),
    (3, {"stage3_max_live_parameters": 6000}),
    (3, {"stage3_max_reuse_distance": 4000}),
]


def test_a_threshold_between_the_sizes_of_slices_decides_alike() -> None:
    wanted = alone()
    for stage, zero in CASES:
        (first, units), (second, others) = run_ranks(train, 2, config_of(stage, **zero))
        assert first == second and units == others, zero
        assert worst(first, wanted) <= SAME, zero


def forwards_of_slices(config: dict[str, Any]) -> list[float]:
    engine = xds.initialize(build(), config)
    losses = []
    with torch.no_grad(), engine.uneven_forwards():
        for _ in range(2 * engine.dp_rank + 1):
            losses.append(engine(**batch_of(0)).loss.item())
    engine.destroy()
    return losses


def test_data_ranks_run_unequal_numbers_of_forwards_of_slices() -> None:
    found = run_ranks(forwards_of_slices, 4, config_of(3, unit_min_numel=0))
    wanted = pytest.approx(alone()[0].loss, rel=SAME)
    assert [len(losses) for losses in found] == [1, 1, 3, 3]
    assert all(loss == wanted for losses in found for loss in losses)


class Whole(nn.Module):
    """Its input is whole on every rank; the layer takes the columns of its rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.down = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(x)


def outputs_of_split_inputs() -> torch.Tensor:
    config = config_of(0)
    config["tensor_parallel"] = {"tp_size": 3, "plan": {"*.down": "rowwise_split_input"}}
    engine = xds.initialize(nn.Sequential(Whole(), nn.Linear(5, 8), Whole()), config)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    found = engine(x).detach()
    engine.destroy()
    return found


def test_each_rank_splits_a_whole_input_at_its_own_columns() -> None:
    """Three ranks have 2, 3 and 3 of eight columns, or in another order."""
    torch.manual_seed(3)
    model = nn.Sequential(Whole(), nn.Linear(5, 8), Whole())
    expected = model(torch.randn(2, 8, generator=torch.Generator().manual_seed(1)))
    for found in run_ranks(outputs_of_split_inputs, 3):
        torch.testing.assert_close(found, expected)


def gathers_of_columns() -> list[bool]:
    """Output and gradient of a gather of ranks with unequal columns, eager and as the op of compiled blocks."""
    group = open_collectives(dist.group.WORLD, torch.device("cpu"))
    exchange, widths = Exchange(group, "a layer"), [1, 4, 2]
    whole = torch.arange(14.0).view(2, 7)
    own = whole.split(widths, 1)[group.rank]
    found = []
    for gather in (
        lambda y: exchange.gather(y, widths),
        lambda y: compiled.gather(y, compiled.number_of(group), widths),
    ):
        y = own.clone().requires_grad_()
        gathered = gather(y)
        (gathered * whole).sum().backward()
        found += [gathered.equal(whole), y.grad.equal(own)]
    return found


def test_a_gather_of_unequal_columns_has_the_gradient_of_each_rank() -> None:
    assert run_ranks(gathers_of_columns, 3) == [[True] * 4] * 3
