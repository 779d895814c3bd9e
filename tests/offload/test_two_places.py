"""Tests: no op of a training with offload mixes host and device memory, in any thread."""

from __future__ import annotations

from typing import Any
from unittest import mock

import offload_runs
import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from models import build, micro_batch
from offload_runs import (
    AUTO,
    CPU,
    GUESS,
    HALF,
    OVERLAP,
    PARAMS,
    config_of,
    device_with,
    every_update_is_guessed,
)
from two_places import DEVICE, HOST, READ, TOUCHED, Mixed, place_of, put, two_places

import xds
from xds.offload.lanes import ThreadLane
from xds.zero.core.master import Master


def train(*case: Any) -> list[str]:
    with two_places(), device_with(60_000), every_update_is_guessed():
        return list(map(repr, offload_runs.train(*case)["numbers"]))


@pytest.mark.parametrize(
    ("world_size", "offload", "case"),
    [
        (1, OVERLAP | GUESS, (2, "fp32", 1)),
        (2, HALF, (1, "bf16", 2)),
        (2, CPU | PARAMS, (3, "fp32", 1)),
        (2, AUTO, (2, "bf16", 1, "Lion")),
        (2, GUESS | PARAMS, (3, "bf16", 1)),
    ],
)
def test_ops_stay_in_one_place(
    world_size: int, offload: dict[str, Any], case: tuple[Any, ...]
) -> None:
    stage, precision, accumulation, *rest = case
    plain = offload_runs.results(world_size, case, None)
    found = run_processes(train, world_size, stage, precision, accumulation, offload, *rest)
    for one, other in zip(plain, found, strict=True):
        assert list(map(repr, one["numbers"][:-1])) == other[:-1]


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


def test_one_read_a_step_waits_for_the_device() -> None:
    for stage, offload in ((2, {}), (2, HALF), (3, CPU | PARAMS)):
        for world_size, accumulation in ((1, 2), (2, 1)):
            for found in run_processes(num_reads, world_size, stage, "bf16", accumulation, offload):
                assert found[3:] == [1, 1], (world_size, offload, found)


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


def test_an_update_is_one_pass_over_host_memory() -> None:
    for stage, offload in ((2, CPU), (3, CPU), (3, CPU | PARAMS), (2, OVERLAP)):
        for found, ops in run_processes(host_bytes, 1, stage, offload):
            # a gradient and a new value of 2 bytes, and the master and two moments, read and written
            assert (found, ops) == (28, ["xds.adam_.default"]), offload


def test_a_mistake_is_found() -> None:
    (found,) = run_processes(mixes, 1)
    assert "equal" in found
