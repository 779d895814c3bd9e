"""Tests of a second engine of one model: the first was kept, dropped, destroyed, or copied with its model."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from warm_ranks import warm

import xds.deepspeed as deepspeed
from xds.deepspeed.utils import groups


def train(model: nn.Module, stage: int, seed: int) -> Any:
    """Two steps of a new engine of `model`."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    parameters = model.parameters()
    engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]
    for step in range(2):
        engine.backward(engine(batch(seed + step, dist.get_rank())).square().mean())
        engine.step()
    return engine


def batch(seed: int, rank: int) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * seed + rank))


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def plain(world_size: int) -> list[Tensor]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in (0, 1, 5, 6):
        for rank in range(world_size):
            (model(batch(seed, rank)).square().mean() / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def again(stage: int, how: str) -> None:
    model = build()
    engine = train(model, stage, 0)
    first = weakref.ref(engine._engine if hasattr(engine, "_engine") else engine)
    if how == "destroyed":
        engine.destroy()
    if how == "mid-step":
        engine.backward(engine(batch(9, dist.get_rank())).square().mean())
    if how != "kept":
        del engine
        gc.collect()
    second = train(model, stage, 5)
    with deepspeed.zero.GatheredParameters(list(second.module.parameters())):
        found = [param.detach().clone() for param in second.module.parameters()]
    for value, expected in zip(found, plain(dist.get_world_size()), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    gc.collect()
    assert how == "kept" or first() is None  # the first engine is gone, and with it what it held
    second.destroy()


@pytest.mark.parametrize("how", ["kept", "dropped", "destroyed", "mid-step"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_engine_goes_on_with_the_values_of_the_first(stage: int, how: str) -> None:
    warm(2).run(again, stage, how)


def copies() -> None:
    model = build()
    engine = train(model, 1, 0)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert other.state_dict().keys() == model.state_dict().keys()
        other.load_state_dict(model.state_dict())
        train(other, 1, 5).destroy()
    engine.destroy()
    assert not model._load_state_dict_post_hooks


def test_copies_of_a_trained_model_do_not_hold_its_engine() -> None:
    warm(2).run(copies)


def sequence_ranks() -> list[int]:
    """What `deepspeed.utils.groups` says while other engines come and go."""
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}}
    found = []
    first = deepspeed.initialize(model=build(), config=config, mesh_param=(1, 2))[0]
    for is_destroyed in (True, False):
        second = deepspeed.initialize(model=build(), config=config)[0]
        found.append(groups._get_sequence_parallel_world_size())
        if is_destroyed:
            second.destroy()
            found.append(groups._get_sequence_parallel_world_size())
        del second
        gc.collect()
        found.append(groups._get_sequence_parallel_world_size())
    first.destroy()
    return found


def test_groups_are_those_of_the_newest_engine_that_trains() -> None:
    assert warm(2).run(sequence_ranks) == [[1, 2, 2, 1, 2]] * 2
