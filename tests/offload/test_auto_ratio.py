"""Tests: a ratio of "auto" moves masters to the device after two updates, without a changed bit."""

from __future__ import annotations

import logging
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import offload_runs
import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import build, micro_batch
from offload_runs import PARAMS, check_equal, config_of
from thinned import few_of
from torch import nn

import xds
from xds.offload.device_memory import DeviceMemory, memory_of, spare
from xds.ops.optim.state_places import scalars_are_beside
from xds.utils.errors import ConfigError
from xds.zero.core import filling
from xds.zero.core.state_memory import StateMemory

AUTO: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "ratio": "auto"}}
DEFERRED: dict[str, Any] = {
    "offload_optimizer": {"device": "cpu", "ratio": "auto", "overlap_step": True}
}
EVERYTHING = 1 << 40


class Fixed(DeviceMemory):
    """A device with `spare` bytes on rank 0, and as many more on the others as they have a rank."""

    def __init__(self, spare: int) -> None:
        self._spare = spare

    def begin(self) -> None:
        return

    def spare_bytes(self) -> int:
        return self._spare + dist.get_rank()


def with_memory(spare: int, function: Any, *args: Any) -> Any:
    with mock.patch.object(filling, "memory_of", lambda device: Fixed(spare)):
        return function(*args)


def check(world_size: int, case: tuple[Any, ...], spares: tuple[int, ...], *offloads: Any) -> None:
    """case: stage, precision, accumulation, optimizer, model."""
    stage, precision, accumulation, *rest = case
    ranks = warm(world_size)
    plain = ranks.run(offload_runs.train, stage, precision, accumulation, None, *rest)
    for offload in offloads or (AUTO,):
        for spare_bytes in spares:
            args = (stage, precision, accumulation, offload, *rest)
            found = ranks.run(with_memory, spare_bytes, offload_runs.train, *args)
            for one, other in zip(plain, found, strict=True):
                check_equal(one, other)


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (3, "fp32")])
def test_two_ranks(stage: int, precision: str) -> None:
    check(2, (stage, precision, 2 if stage == 1 else 1), (100_000,))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank(precision: str) -> None:
    check(1, (2, precision, 2), (150_000, EVERYTHING), AUTO, DEFERRED)


def test_parameters_on_the_host_and_overlapping_steps() -> None:
    check(2, (3, "bf16", 1), (EVERYTHING,), AUTO | PARAMS)
    check(2, (2, "fp32", 1), (100_000,), DEFERRED)


MODELS = [  # feature, world_size
    *(("plain", 1), ("plain", 2), ("tied", 2), ("frozen", 1), ("checkpointed_reentrant", 2)),
]
OFFLOADS = {"auto": AUTO, "deferred": DEFERRED, "params": AUTO | PARAMS}
EVERY = product(MODELS, (0, 1, 2, 3), ("fp32", "bf16", "fp16"), OFFLOADS, (100_000, EVERYTHING))
CHOSEN = few_of([case for case in EVERY if (case[1] == 3) == (case[3] == "params")], tuple)


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "world_size"), MODELS)
def test_combinations(world_size: int, feature: str) -> None:
    for model, stage, precision, name, spare_bytes in CHOSEN:
        if model == (feature, world_size):
            case = (stage, precision, 2, "AdamW", feature)
            check(world_size, case, (spare_bytes,), OFFLOADS[name])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["Lion", "Lamb", "Muon", "Adagrad", "RMSprop", "SGD"])
def test_other_optimizers(optimizer: str) -> None:
    for stage in (1, 3):
        check(2, (stage, "bf16", 1, optimizer), (60_000, EVERYTHING))


# -- what moves ---------------------------------------------------------------------------------------------


def run(engine: xds.Engine, steps: range) -> None:
    for step in steps:
        engine.backward(engine(micro_batch(step, 0)))
        engine.step()


def engine_of(spare_bytes: int, offload: dict[str, Any] = AUTO, stage: int = 2) -> xds.Engine:
    config = config_of(stage, "bf16", 1, offload, "AdamW")
    with mock.patch.object(filling, "memory_of", lambda device: Fixed(spare_bytes)):
        return xds.initialize(build("plain"), config)


def needs(engine: xds.Engine) -> list[int]:
    updater = engine._parts.updater
    return [StateMemory(updater).bytes_on_device(master) for master in updater.masters]


def homes(engine: xds.Engine) -> list[bool]:
    return [master.home.is_on_host for master in engine._parts.updater.masters]


def moves() -> None:
    """In one process: the first masters move as far as they fit, and tensors stay the same objects."""
    reference = engine_of(0)
    run(reference, range(2))
    sizes = needs(reference)
    for count in range(len(sizes) + 1):
        exactly = sum(sizes[:count])
        engine = engine_of(exactly)
        run(engine, range(1))
        assert all(homes(engine))
        before = [
            id(item.master) for master in engine._parts.updater.masters for item in master.items
        ]
        states = {id(tensor) for tensor in engine.optimizer.state}
        host_bytes = engine.memory_plan()["host"]
        run(engine, range(1, 3))
        assert homes(engine) == [at >= count for at in range(len(sizes))]
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
    assert all(homes(almost))


def test_masters_move_in_the_order_of_forward() -> None:
    run_ranks(moves, 1)


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
    assert all(homes(other))
    run(other, range(5, 7))
    assert not homes(other)[0] and all(homes(other)[1:])
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
        with mock.patch.object(filling, "memory_of", lambda device: Fixed(EVERYTHING)):
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


def sentences(on_cpu: bool) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("xds")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    config = config_of(2, "bf16", 1, AUTO, "AdamW")
    measure = memory_of if on_cpu else lambda device: Fixed(80_000)
    with mock.patch.object(filling, "memory_of", measure):
        engine = xds.initialize(build("plain"), config)
    for step in range(3):
        engine.backward(engine(micro_batch(step, 0)))
        engine.step()
    assert all(homes(engine)) == on_cpu
    engine.destroy()
    log.removeHandler(handler)
    return [text for text in found if "auto" in text]


def test_one_sentence_on_rank_0() -> None:
    one, other = run_ranks(sentences, 2, True)
    assert one == [
        'offload_optimizer.ratio = "auto": the device is a CPU, so all optimizer states stay on the host'
    ]
    assert other == []
    (one,), other = run_ranks(sentences, 2, False)
    assert "of the optimizer states are on the device now" in one and other == []


# -- arithmetic and settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "reserved", "peak", "expected"),
    [
        (1000, 0, 0, 900),
        (400, 600, 700, 200),
        (300, 600, 700, 100),  # 100 bytes belong to others
        (0, 1000, 1000, 0),
        (300, 100, 500, 0),
    ],
)
def test_spare_bytes(free: int, reserved: int, peak: int, expected: int) -> None:
    assert spare(1000, free, reserved=reserved, peak=peak) == expected


def test_states_of_one_element() -> None:
    tensor = torch.zeros(3)
    for flags, beside in (({}, False), ({"fused": True}, True), ({"capturable": True}, True)):
        assert scalars_are_beside(torch.optim.Adam([tensor], **flags), tensor) == beside
    assert not scalars_are_beside(None, tensor)


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
