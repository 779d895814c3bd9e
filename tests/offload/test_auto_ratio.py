"""A ratio of "auto" moves masters to the device after two updates, as many as fit there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import build, micro_batch
from offload_runs import AUTO, EVERYTHING, Fixed, config_of, device_with
from torch import nn

import xds
from xds.offload import device_memory
from xds.offload.device_memory import free_at_peak
from xds.ops.optim.shard_optimizer import World
from xds.utils.errors import ConfigError
from xds.zero.core.optimizer_tensors import OptimizerTensors
from xds.zero.core.torch_optimizer import TorchShardOptimizer
from xds.zero.model.state_memory import StateMemory


def run(engine: xds.Engine, steps: range) -> None:
    for step in steps:
        engine.backward(engine(micro_batch(step, 0)))
        engine.step()


def engine_of(spare_bytes: int, offload: dict[str, Any] = AUTO, stage: int = 2) -> xds.Engine:
    config = config_of(stage, "bf16", 1, offload, "AdamW")
    with device_with(spare_bytes):
        return xds.initialize(build("plain"), config)


def needs(engine: xds.Engine) -> list[int]:
    updater = engine._parts.updater
    return [StateMemory(updater).bytes_on_device(master) for master in updater.masters]


def stores(engine: xds.Engine) -> list[bool]:
    return [master.store.is_on_host for master in engine._parts.updater.masters]


def moves() -> None:
    """In one process: the first masters move as far as they fit, and tensors stay the same objects."""
    reference = engine_of(0)
    run(reference, range(2))
    sizes = needs(reference)
    for count in range(len(sizes) + 1):
        exactly = sum(sizes[:count])
        engine = engine_of(exactly)
        run(engine, range(1))
        assert all(stores(engine))
        before = [
            id(item.master) for master in engine._parts.updater.masters for item in master.items
        ]
        states = {id(tensor) for tensor in engine.optimizer.state}
        host_bytes = engine.memory_plan()["host"]
        run(engine, range(1, 3))
        assert stores(engine) == [at >= count for at in range(len(sizes))]
        after = [
            id(item.master) for master in engine._parts.updater.masters for item in master.items
        ]
        assert after == before and {id(tensor) for tensor in engine.optimizer.state} == states
        plan = engine.memory_plan()
        assert plan["master"] + plan["optimizer"] <= exactly
        assert (plan["host"] < host_bytes) == (count > 0)
        for master in engine._parts.updater.masters:
            for item in master.items:
                storage = master.raw.untyped_storage().data_ptr()
                assert item.master.untyped_storage().data_ptr() == storage
        engine.destroy()
    almost = engine_of(sizes[0] - 1)
    run(almost, range(3))
    assert all(stores(almost))


def test_masters_move_in_the_order_of_forward() -> None:
    run_ranks(moves, 1)


def with_room_on_one_rank() -> list[bool]:
    engine = xds.initialize(build("plain"), config_of(2, "bf16", 1, AUTO, "AdamW"))
    run(engine, range(3))
    return stores(engine)


def test_masters_move_where_they_fit_on_every_rank() -> None:
    """Ranks gather a buffer together, so they move the same ones."""

    def spare(_: torch.device) -> Any:
        return Fixed(EVERYTHING if dist.get_rank() else 0)

    with mock.patch.object(device_memory, "memory_of", spare):
        assert all(map(all, run_ranks(with_room_on_one_rank, 2)))


def resumes(folder: str) -> None:
    """The choice is not saved: it is measured again, and every bit continues."""
    whole = engine_of(0, {})
    run(whole, range(7))
    sizes = needs(whole)
    engine = engine_of(sum(sizes))
    run(engine, range(4))
    engine.save_checkpoint(folder)
    other = engine_of(sizes[0])
    other.load_checkpoint(folder)
    run(other, range(4, 5))
    assert all(stores(other))
    run(other, range(5, 7))
    assert not stores(other)[0] and all(stores(other)[1:])
    run(engine, range(4, 6))
    engine.load_checkpoint(folder)  # its masters are on the device already
    run(engine, range(4, 7))
    expected = whole.full_state_dict(full_precision=True)
    for found in (other, engine):
        for name, value in found.full_state_dict(full_precision=True).items():
            assert torch.equal(value, expected[name]), name


def test_a_load_measures_again(tmp_path: Path) -> None:
    run_ranks(resumes, 1, str(tmp_path))


def a_graph_that_outlives_a_step() -> list[bool]:
    """Whether backward through a graph from before a step raises: without offload, and after a move."""
    raised = []
    for offload in ({}, AUTO):
        config = config_of(0, "fp32", 1, offload, "AdamW")
        with device_with(EVERYTHING):
            engine = xds.initialize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), config)
        for _ in range(3):
            engine.backward(engine(torch.ones(4, 4)).sum())
            engine.step()
        loss = engine(torch.ones(4, 4)).sum()
        engine.backward(loss, retain_graph=True)
        engine.step()
        try:
            engine.backward(loss)
        except RuntimeError:
            raised.append(True)
        else:
            raised.append(False)
    return raised


def test_a_graph_that_outlives_a_step_is_noticed_as_before() -> None:
    ((without, moved),) = run_ranks(a_graph_that_outlives_a_step, 1)
    assert without == moved


def three_steps(on_host: bool) -> None:
    engine = xds.initialize(build("plain"), config_of(2, "bf16", 1, AUTO, "AdamW"))
    run(engine, range(3))
    assert all(stores(engine)) == on_host
    engine.destroy()


def test_one_sentence_on_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [text for text in texts if "auto" in text]

    caplog.set_level(logging.INFO, "xds")
    run_ranks(three_steps, 2, True)
    assert said() == [
        'offload_optimizer.ratio = "auto": the device is a CPU, so all optimizer states stay on the host'
    ]
    with device_with(80_000):
        run_ranks(three_steps, 2, False)
    (text,) = said()
    assert "of the optimizer states are on the device now" in text


def test_spare_bytes() -> None:
    for free, reserved, peak, expected in (
        (1000, 0, 0, 900),
        (400, 600, 700, 200),
        (300, 600, 700, 100),  # 100 bytes belong to others
        (0, 1000, 1000, 0),
        (300, 100, 500, 0),
    ):
        assert free_at_peak(1000, free, reserved=reserved, peak=peak) == expected


def test_states_of_one_element() -> None:
    tensor = torch.zeros(3)
    for flags, beside in (({}, False), ({"fused": True}, True), ({"capturable": True}, True)):
        given = torch.optim.Adam([tensor], **flags)
        stepped = TorchShardOptimizer(given, OptimizerTensors([], World(None, ())))
        assert stepped.has_scalars_beside(tensor) == beside


def test_settings() -> None:
    def load(ratio: Any) -> xds.Config:
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
        return xds.Config.load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})

    assert load("Auto").zero_optimization.offload_optimizer.ratio == "auto"
    assert load(None).zero_optimization.offload_optimizer.ratio == 1.0
    for wrong in (-0.1, 1.5, "all", True):
        with pytest.raises(
            ConfigError, match='must be a number, at least 0 and at most 1, or "auto"'
        ):
            load(wrong)
