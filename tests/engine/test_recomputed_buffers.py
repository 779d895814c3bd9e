"""Forwards that run again, in backward or for a proof, have no second effect on buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import run_ranks
from runs import config
from torch import Tensor, nn

import xds
from xds.deepspeed import checkpointing
from xds.pipe import PipelineModule

WIDTH, STEPS, COUNT = 6, 2, 3


class Block(nn.Module):
    """Its result depends on buffers that it writes: a counter, and the vectors of a spectral norm.

    spectral: False: it does not. A compiled block would get wrong gradients, also without xds (torch 2.13).
    """

    def __init__(self, spectral: bool = True) -> None:
        super().__init__()
        linear = nn.Linear(WIDTH, WIDTH)
        self.linear = nn.utils.parametrizations.spectral_norm(linear) if spectral else linear
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(WIDTH))
        self.spectral = spectral

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.norm(self.linear(x)) * self.mask
        return x + torch.relu(h) / (self.calls if self.spectral else 2)


class Model(nn.Module):
    """A buffer is written before the blocks, and one in a module without parameters after them."""

    def __init__(self, spectral: bool = True, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(spectral) for _ in range(depth))
        self.last = nn.BatchNorm1d(WIDTH, affine=False)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x)).square().mean() * self.calls


def train(model: nn.Module, **more: Any) -> dict[str, Tensor]:
    """State after some steps, buffers included; of the whole model."""
    settings = config(0, samples=4, accumulation=COUNT, optimizer="SGD", **more)
    engine = xds.initialize(model, settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batches = [torch.randn(4, WIDTH, generator=generator) + 1 for _ in range(COUNT)]
        engine.train_batch(iter([{"x": batch} for batch in batches]))
    found = {name: value.clone() for name, value in engine.state_dict().items()}
    found |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    engine.destroy()
    return found


def model_of(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return [name for name in found if not torch.equal(found[name], wanted[name])]


RECOMPUTED = {"activation_checkpointing": {"enabled": True}}
CPU = {"activation_checkpointing": {"enabled": True, "cpu_checkpointing": True}}


@pytest.mark.parametrize(("stage", "more"), [(1, CPU), (3, RECOMPUTED)])
def test_a_recomputed_block_counts_once_and_finds_the_values_of_its_forward(
    stage: int, more: dict[str, Any]
) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    wanted = train(model_of(Model), **zero)
    assert wanted["blocks.0.norm.num_batches_tracked"] == STEPS * COUNT
    assert not differences(train(model_of(Model), **zero, **more), wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_the_same_where_blocks_are_compiled() -> None:
    zero = {"zero_optimization": {"stage": 1}, "compile": {"enabled": True, "backend": "eager"}}
    plain = partial(Model, False)
    wanted, found = train(model_of(plain)), train(model_of(plain), **zero, **CPU)
    assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in wanted)


def buffers_in_a_pipeline(schedule: str, chunks: int, more: dict[str, Any]) -> dict[str, Tensor]:
    bounds = list(range(2 * chunks + 1))  # one block in each stage
    cut = {"stages": 2, "schedule": schedule, "chunks": chunks, "partition": bounds}
    model = model_of(partial(Model, depth=2 * chunks))
    found = train(model, pipeline=cut, **more)
    return {name: found[name] for name, _ in model.named_buffers()}


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved_1f1b", 3), ("zbv", 2)])
def test_a_rank_with_several_stages_writes_a_buffer_outside_of_blocks_once(
    schedule: str, chunks: int
) -> None:
    wanted = train(model_of(partial(Model, depth=2 * chunks)))
    first, last = run_ranks(buffers_in_a_pipeline, 2, schedule, chunks, RECOMPUTED)
    where = first if schedule == "zbv" else last  # the rank with the last stage
    for name, buffer in where.items():
        assert torch.allclose(buffer, wanted[name], atol=1e-5), name
    assert first["calls"] == last["calls"] == STEPS * COUNT


def as_layers(interval: int, function: Any = None) -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 1), Square()]
    chosen = {} if function is None else {"activation_checkpoint_func": function}
    return PipelineModule(layers, activation_checkpoint_interval=interval, **chosen)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_layers_of_a_pipeline_module_count_once() -> None:
    x = torch.randn(4, WIDTH) + 1
    results = []
    for interval, function in ((0, None), (2, None), (2, checkpointing.checkpoint)):
        model = model_of(partial(as_layers, interval, function))
        for _ in range(3):
            model(x).backward()
        results.append(
            {**dict(model.named_buffers()), "grad": model.get_parameter("0.weight").grad}
        )
    assert not differences(results[1], results[0])
    assert not differences(results[2], results[0])


def test_a_function_that_deepspeeds_checkpoint_gets_counts_once() -> None:
    block = model_of(Block)
    other = copy.deepcopy(block)
    x = torch.randn(4, WIDTH, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return other(x)

    for _ in range(3):
        block(x).sum().backward()
        checkpointing.checkpoint(run, x).sum().backward()
    assert not differences(dict(other.named_buffers()), dict(block.named_buffers()))


def test_tiles_that_run_again_in_backward_count_once() -> None:
    class Counted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("tiles", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.tiles += 1
            return super().forward(x)

    module = Counted()
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    xds.tensor.tiled_mlp(module, x, 4).sum().backward()
    assert module.tiles == 4
    xds.tensor.run_in_tiles(lambda x: module(x), [x], tiles=4).sum().backward()
    assert module.tiles == 8
    xds.tensor.tile_forward(module, 2)(x).sum().backward()
    assert module.tiles == 12
