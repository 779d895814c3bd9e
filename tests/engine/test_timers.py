"""Timers, throughput and memory; a clock of our own where time matters."""

from __future__ import annotations

import mmap

import pytest
import torch

from xds.engine.telemetry.timers import (
    Rates,
    Throughput,
    Timers,
    breakdown,
    memory_use,
)

CPU = torch.device("cpu")


class HandClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_regions_add_up_and_start_again() -> None:
    clock = HandClock()
    timers = Timers(CPU, enabled=True, clock=clock)
    for seconds in (0.25, 0.5):
        with timers.region("forward"):
            clock.seconds += seconds
    with timers.region("step"):
        clock.seconds += 1.0
        with timers.region("reduce"):
            clock.seconds += 2.0
    assert timers.last_milliseconds() == {"forward": 500.0, "reduce": 2000.0, "step": 1000.0}
    found = timers.take_milliseconds()
    assert found == {"forward": 750.0, "reduce": 2000.0, "step": 1000.0}  # each second counts once
    assert timers.take_milliseconds() == {}
    assert breakdown({**found, "backward": 1500.0}) == {
        "fwd": 750.0,
        "bwd": 3500.0,
        "bwd_inner": 1500.0,
        "bwd_allreduce": 2000.0,
        "step": 1000.0,
    }
    assert breakdown({}) == {}


def test_a_region_that_raises_is_counted_and_does_not_swallow() -> None:
    clock = HandClock()
    timers = Timers(CPU, enabled=True, clock=clock)
    with pytest.raises(ValueError, match="inside"), timers.region("forward"):
        clock.seconds += 1.0
        raise ValueError("inside")
    assert timers.take_milliseconds() == {"forward": 1000.0}


def test_off_measures_nothing() -> None:
    timers = Timers(CPU, enabled=False)
    with timers.region("forward"), timers.region("forward"):
        pass
    assert timers.take_milliseconds() == {}
    throughput = Throughput(CPU, enabled=False, synchronized=True)
    throughput.step(8)
    assert throughput.read() is None


def test_throughput_leaves_out_the_first_two_steps() -> None:
    clock = HandClock()
    throughput = Throughput(CPU, enabled=True, synchronized=True, clock=clock)
    seen = []
    for seconds in (50.0, 50.0, 1.0, 4.0):
        clock.seconds += seconds
        throughput.step(8)
        seen.append(throughput.read())
    assert seen == [None, None, Rates(last=8.0, overall=8.0), Rates(last=2.0, overall=3.2)]
    clock.seconds += 10.0
    assert throughput.read() == seen[-1]  # no step since: the last reading stands


def test_throughput_between_readings() -> None:
    clock = HandClock()
    throughput = Throughput(CPU, enabled=True, synchronized=False, clock=clock)
    for _ in range(6):
        throughput.step(4)
        clock.seconds += 2.0
    assert throughput.read() == Rates(last=1.6, overall=1.6)  # 4 steps of 4 samples in 10 s


def test_memory_of_the_process() -> None:
    before = memory_use(CPU)
    block = mmap.mmap(-1, 64 * 2**20)  # malloc might give what it kept of earlier tests
    block.write(bytes(64 * 2**20))
    during = memory_use(CPU)
    block.close()
    assert 0 < before.now_bytes <= before.peak_bytes
    assert during.peak_bytes >= during.now_bytes >= before.now_bytes + 32 * 2**20
