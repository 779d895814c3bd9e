"""Tests: bytes on the device and on the host are those of the formula, and units come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runs import config
from torch import nn

import xds
from xds.offload.host import NUM_BUFFERS

WIDTH, DEPTH = 64, 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def engine_of(stage: int, accumulation: int, **offload: Any) -> xds.Engine:
    zero = {"units": ["Linear"], **offload}
    settings = config(stage, "bf16", accumulation=accumulation, params={"lr": 1e-3}, zero=zero)
    return xds.initialize(model(), settings)


def train(engine: xds.Engine) -> None:
    for _ in range(2 * engine.gradient_accumulation_steps()):
        batch = torch.ones(2, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()


def numels(engine: xds.Engine) -> list[int]:
    return [flat.layout.numel for unit in engine._parts.sharded.units for flat in unit.params]


@pytest.mark.parametrize(("accumulation", "bytes_each"), [(1, 14), (3, 16)])
def test_bytes_of_the_optimizer_on_the_host(accumulation: int, bytes_each: int) -> None:
    engine = engine_of(2, accumulation, offload_optimizer={"device": "cpu"})
    train(engine)
    sizes, plan = numels(engine), engine.memory_plan()
    steps = 4 * len(sizes)  # Adam's step counts
    ring = NUM_BUFFERS * 2 * max(sizes)
    assert plan["host"] == bytes_each * sum(sizes) + steps + ring
    assert (plan["param"], plan["grad"]) == (2 * sum(sizes), 0)
    assert (plan["master"], plan["optimizer"]) == (0, 0)
    assert plan["buckets"] <= 4 * 2 * max(sizes)  # gradients of a few units, in bf16
    engine.destroy()


def test_bytes_of_parameters_on_the_host() -> None:
    engine = engine_of(3, 1, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    held = []

    def count(*_: Any) -> None:
        units = engine._parts.sharded.units
        storages = [flat.raw.untyped_storage() for unit in units for flat in unit.params]
        held.append(sum(storage.nbytes() for storage in storages))

    for layer in engine.module:  # type: ignore[attr-defined]
        layer.register_forward_hook(count)
        layer.register_full_backward_hook(count)
    train(engine)
    sizes, plan = numels(engine), engine.memory_plan()
    steps = 4 * len(sizes)
    assert plan["host"] == 16 * sum(sizes) + steps
    assert (plan["param"], plan["grad"], plan["master"], plan["optimizer"]) == (0, 0, 0, 0)
    assert max(held) <= 2 * 2 * max(sizes)
    engine.destroy()


def test_a_ratio_is_met_to_one_unit() -> None:
    for ratio in (0.0, 0.2, 0.5, 0.9, 1.0):
        engine = engine_of(2, 1, offload_optimizer={"device": "cpu", "ratio": ratio})
        train(engine)
        stores = [store for unit in engine._parts.sharded.units for store in unit.master_stores]
        sizes = numels(engine)
        share = [s for s, store in zip(sizes, stores, strict=True) if store.is_on_host]
        assert abs(sum(share) - ratio * sum(sizes)) <= max(sizes)
        assert [store.is_on_host for store in stores] == sorted(
            store.is_on_host for store in stores
        )
        engine.destroy()


@pytest.mark.parametrize("params", [{}, {"offload_param": {"device": "cpu"}}])
def test_a_write_to_a_gathered_parameter_counts(params: dict[str, Any]) -> None:
    engine = engine_of(3, 1, offload_optimizer={"device": "cpu"}, **params)
    first = engine.module[0]  # type: ignore[index]
    value = 0.0

    def write(*_: Any) -> None:
        if value == 2.0:
            with torch.no_grad():
                first.weight.fill_(value)
        elif value:
            first.weight.data = torch.full_like(first.weight, value)

    first.register_forward_pre_hook(write)
    train(engine)
    for value in (2.0, 3.0):
        engine(torch.ones(2, WIDTH, dtype=torch.bfloat16))
        assert xds.zero.get_full_param(first.weight).eq(value).all()
    value = 0.0
    train(engine)  # from 3, where the master of an element is within a few steps of it
    assert (xds.zero.get_full_param(first.weight) - 3.0).abs().max() < 0.1
    engine.destroy()


def test_a_step_that_overlaps_shows_no_old_values() -> None:
    overlapping = {"device": "cpu", "overlap_step": True}
    engine = engine_of(2, 1, offload_optimizer=overlapping)
    plain = engine_of(2, 1)
    for one in (engine, plain):
        train(one)
    weight = engine.module[0].weight  # type: ignore[index]
    assert weight.isnan().all()
    states = engine.module.state_dict()
    assert not weight.isnan().any()
    for name, value in plain.module.state_dict().items():
        assert torch.equal(states[name], value), name
    train(engine)
    with pytest.raises(RuntimeError), torch.no_grad():
        weight.add_(1.0)
    engine.destroy()
    plain.destroy()
