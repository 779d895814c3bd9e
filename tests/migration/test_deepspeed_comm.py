"""Tests of deepspeed.comm: its collectives, and the log of the script's and the engine's."""

from __future__ import annotations

import logging
import time
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import run_processes
from models import build, micro_batch

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer


def call_collectives() -> dict[str, Any]:
    comm = deepspeed.comm
    rank, world = comm.get_rank(), comm.get_world_size()
    ones = torch.ones(6)
    found: dict[str, Any] = {}
    comm.all_reduce(total := ones * (rank + 1))
    comm.all_gather_into_tensor(gathered := torch.empty(6 * world), tensor=ones * rank)
    comm.reduce_scatter_tensor(output_tensor=(part := torch.empty(3)), tensor=torch.ones(3 * world))
    comm.all_gather(
        parts := [torch.empty(6) for _ in range(world)], ones * rank, async_op=True
    ).wait()
    comm.broadcast(value := torch.full((2,), float(rank)), 1)
    other = 1 - rank
    received = torch.empty(4)
    operations = [
        comm.P2POp(comm.isend, torch.full((4,), float(rank)), other),
        comm.P2POp(comm.irecv, received, other),
    ]
    for work in comm.batch_isend_irecv(operations):
        work.wait()
    comm.barrier()
    found["sums"] = [t.sum().item() for t in (total, gathered, part, parts[1])]
    found["broadcast"] = value.tolist()
    found["received"] = received.tolist()
    return found


def test_collectives_are_torchs() -> None:
    for rank, found in enumerate(run_processes(call_collectives, 2)):
        assert found["sums"] == [18, 6, 6, 6]
        assert found["broadcast"] == [1.0, 1.0]
        assert found["received"] == [1.0 - rank] * 4


def the_log() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "comms_logger": {"enabled": True},
    }
    with pytest.raises(AssertionError, match="set comms_logger.enabled"):
        deepspeed.comm.configure(enabled=True)
    engine, *_ = deepspeed.initialize(model=build("plain"), config=config)
    engine.backward(engine(micro_batch(0, engine.global_rank)))
    engine.step()
    deepspeed.comm.configure(engine.config)
    with redirect_stdout(StringIO()) as said:
        deepspeed.comm.log_summary(show_straggler=True)
    assert ("reduce_scatter" in said.getvalue()) == (engine.global_rank == 0)


def test_the_log_is_that_of_the_engines() -> None:
    run_processes(the_log, 2)


def test_timers(caplog: pytest.LogCaptureFixture) -> None:
    timers = SynchronizedWallClockTimer()
    for _ in range(3):
        timers("data").start()
        time.sleep(0.001)
        timers("data").stop()
    assert timers("data").elapsed(reset=False) >= 3.0
    with caplog.at_level(logging.INFO, "xds"):
        timers.log(["data", "none"])
    assert "time (ms) | data: " in caplog.text
    assert timers("data").elapsed() == 0.0
    with pytest.raises(xds.UsageError, match="is not started"):
        timers("data").stop()
    timers("data").start()
    with pytest.raises(xds.UsageError, match="already been started"):
        timers("data").start()
    assert "mem_allocated: " in timers.memory_usage()


def test_throughput() -> None:
    lines: list[str] = []
    config = SimpleNamespace(enabled=True, synchronized=True)
    timer = ThroughputTimer(config, 32, steps_per_output=2, logging_fn=lines.append)
    assert timer.avg_samples_per_sec() == float("-inf")
    for _ in range(4):
        for is_last in (False, True):
            timer.start()
            timer.stop(global_step=is_last)
    assert (timer.global_step_count, timer.micro_step_count) == (4, 8)
    assert timer.avg_samples_per_sec() == pytest.approx(64 / (timer.total_elapsed_time + 1e-6))
    assert [line.partition(",")[0] for line in lines] == ["epoch=0/micro_step=8/global_step=4"]
