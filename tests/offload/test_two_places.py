"""Tests: no op of a training with offload mixes host and device memory, in any thread."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import offload_runs
import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import build, micro_batch
from offload_runs import CPU, GUESS, HALF, OVERLAP, PARAMS, config_of
from test_auto_ratio import AUTO, with_memory
from thinned import few_of
from two_places import DEVICE, HOST, READ, TOUCHED, Mixed, place_of, put, two_places

import xds
from xds.offload.lanes import ThreadLane
from xds.zero.core.master import Master


def train(*case: Any) -> list[Any]:
    with two_places():
        numbers = offload_runs.train(*case)["numbers"]
    return list(map(repr, numbers))


def check(world_size: int, offload: dict[str, Any], *case: Any) -> None:
    ranks = warm(world_size)
    stage, precision, accumulation, *rest = case
    full = (stage, precision, accumulation, offload, *rest)
    numbers = ranks.run(with_memory, 60_000, train, *full)
    plain = ranks.run(offload_runs.train, stage, precision, accumulation, None, *rest)
    for one, other in zip(plain, numbers, strict=True):
        assert list(map(repr, one["numbers"][:-1])) == other[:-1]


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "offload"),
    [
        (1, 2, "fp32", OVERLAP | GUESS),
        (2, 1, "bf16", HALF),
        (2, 3, "fp32", CPU | PARAMS),
        pytest.param(1, 2, "bf16", CPU, marks=pytest.mark.slow),
        pytest.param(2, 0, "fp32", CPU, marks=pytest.mark.slow),
        pytest.param(2, 2, "bf16", AUTO, marks=pytest.mark.slow),
        pytest.param(2, 3, "bf16", GUESS | PARAMS, marks=pytest.mark.slow),
    ],
)
def test_ops_stay_in_one_place(
    world_size: int, stage: int, precision: str, offload: dict[str, Any]
) -> None:
    check(world_size, offload, stage, precision, 2 if stage < 2 else 1)


OFFLOADS = {"cpu": CPU, "half": HALF, "auto": AUTO, "overlap": OVERLAP, "params": PARAMS}
OFFLOADS |= {"cpu, params": CPU | PARAMS, "auto, params": AUTO | PARAMS}
EVERY = product((1, 2), (0, 1, 2, 3), ("fp32", "bf16", "fp16"), OFFLOADS)
CHOSEN = few_of(
    [case for case in EVERY if (case[3] != "overlap" if case[1] == 3 else "params" not in case[3])],
    tuple,
)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_combinations(world_size: int) -> None:
    for ranks, stage, precision, name in CHOSEN:
        if ranks == world_size:
            accumulation = 2 if precision == "bf16" else 1
            check(world_size, OFFLOADS[name], stage, precision, accumulation)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["Lion", "Lamb", "Muon", "Adagrad", "SGD", "RMSprop"])
def test_other_optimizers(optimizer: str) -> None:
    for precision in ("fp32", "bf16"):
        for stage, offload in ((1, HALF), (3, CPU), (3, CPU | PARAMS)):
            # torch's own classes group tensors by their devices, which are one device here
            is_own = optimizer in ("Lion", "Lamb", "Muon") or precision == "bf16"
            check(2, offload if is_own else CPU, stage, precision, 1, optimizer)


def test_the_helper_itself() -> None:
    with two_places():
        host, device = put(torch.zeros(3), HOST), put(torch.zeros(3), DEVICE)
        assert place_of(host[1:] * 2) == HOST
        assert place_of(torch.ones(3)) is None
        later = torch.ones(3)
        assert place_of(device + later) == DEVICE and place_of(later) == DEVICE
        host.copy_(device)
        with pytest.raises(Mixed, match="mixes host and device memory"):
            host + device
        with pytest.raises(Mixed):
            host + later
        assert place_of(device.to("cpu")) is None
        assert device + put(torch.tensor(2.0), HOST) is not None  # a single element
        lane = ThreadLane("test")
        with pytest.raises(Mixed):
            lane.run(lambda: host.add_(device)).wait()
        lane.close()
    assert place_of(host + device) is None or place_of(host) == HOST


def mixes() -> str:
    """A master on the host that is compared with parameters on the device, where both are."""

    def wrong(master: Master) -> None:
        master.raw.equal(master.compute)
        remember(master)

    remember = Master.remember
    assert dist.is_initialized()
    with mock.patch.object(Master, "remember", wrong), two_places():
        try:
            offload_runs.train(2, "fp32", 1, CPU)
        except Mixed as error:
            return str(error)
    return ""


def num_reads(stage: int, precision: str, accumulation: int, offload: dict[str, Any]) -> list[int]:
    """Reads of the device's values in each of five steps without events."""
    counts = []
    config = config_of(stage, precision, accumulation, offload, "AdamW")
    with two_places():
        engine = xds.initialize(build("plain"), config)
        for step in range(5):
            READ.clear()
            for _ in range(accumulation):
                engine.backward(engine(micro_batch(step, 0)))
                engine.step()
            counts.append(len(READ))
        engine.destroy()
    return counts


@pytest.mark.parametrize(
    ("stage", "offload", "expected"),
    [
        *((2, {}, 1), (2, CPU, 1), (3, CPU | PARAMS, 1)),
        *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in ((2, HALF), (2, OVERLAP))),
        pytest.param(3, CPU, 1, marks=pytest.mark.slow),
    ],
)
def test_reads_that_wait_for_the_device(stage: int, offload: dict[str, Any], expected: int) -> None:
    for world_size, accumulation in ((1, 2), (2, 1)):
        for found in run_ranks(num_reads, world_size, stage, "bf16", accumulation, offload):
            assert found[3:] == [expected] * 2, (world_size, found)


def host_bytes(stage: int, offload: dict[str, Any]) -> tuple[float, list[str]]:
    """Bytes of its memory that the host touches in a step with clipping, for each element; by which ops."""
    config = config_of(stage, "bf16", 1, offload, "AdamW")
    config["ops"] = {"require": True}
    with two_places():
        engine = xds.initialize(build("plain"), config)
        for step in range(4):
            TOUCHED.clear()
            engine.backward(engine(micro_batch(step, 0)))
            engine.step()
            engine._parts.updater.wait()
        numel = sum(master.raw.numel() for master in engine._parts.updater.masters)
        found = list(TOUCHED)
        engine.destroy()
    return sum(count for _, count in found) / numel, sorted({op for op, _ in found})


@pytest.mark.parametrize(
    ("stage", "offload"), [(2, CPU), (3, CPU), (3, CPU | PARAMS), (2, OVERLAP)]
)
def test_an_update_is_one_pass_over_host_memory(stage: int, offload: dict[str, Any]) -> None:
    for found, ops in run_ranks(host_bytes, 1, stage, offload):
        # a gradient and a new value of 2 bytes, and the master and two moments, read and written
        assert (found, ops) == (28, ["xds.adam_.default"])


def test_a_mistake_is_found() -> None:
    (found,) = run_ranks(mixes, 1)
    assert "equal" in found
