"""Tests of deepspeed.comm: its collectives, and the log of the script's and the engine's."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import run_ranks
from tiny_models import build, micro_batch

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed.comm.collectives import COLLECTIVES
from xds.deepspeed.utils.comms_logging import (
    CommsLogger,
    calc_bw_log,
    convert_size,
    get_caller_func,
)
from xds.deepspeed.utils.timer import (
    NoopTimer,
    SynchronizedWallClockTimer,
    ThroughputTimer,
    trim_mean,
)


def call_collectives() -> dict[str, Any]:
    comm = deepspeed.comm
    rank, world = comm.get_rank(), comm.get_world_size()
    ones = torch.ones(6)
    found: dict[str, Any] = {}
    comm.all_reduce(total := ones * (rank + 1))
    comm.inference_all_reduce(more := ones.to(torch.bfloat16))
    comm.all_gather_into_tensor(gathered := torch.empty(6 * world), tensor=ones * rank)
    comm.reduce_scatter_tensor(output_tensor=(part := torch.empty(3)), tensor=torch.ones(3 * world))
    comm.all_gather(
        parts := [torch.empty(6) for _ in range(world)], ones * rank, async_op=True
    ).wait()
    comm.all_reduce_coalesced(pair := [ones.clone(), ones.clone()])
    handle = comm.all_gather_coalesced([wide := torch.empty(6 * world)], [ones], async_op=True)
    handle.wait()
    comm.broadcast(value := torch.full((2,), float(rank)), 1)
    other = 1 - rank
    received = torch.empty(4)
    operations = [
        comm.P2POp(comm.isend, torch.full((4,), float(rank)), other),
        comm.P2POp(comm.irecv, received, other),
    ]
    for work in comm.batch_isend_irecv(operations):
        work.wait()
    comm.barrier(log_name="my barrier")
    found["sums"] = [t.sum().item() for t in (total, more, gathered, part, parts[1], *pair, wide)]
    found["broadcast"] = value.tolist()
    found["received"] = received.tolist()
    return found


def logged_collectives() -> dict[str, Any]:
    comm = deepspeed.comm
    assert not comm.has_comm_data()
    call_collectives()
    assert comm.get_comm_operation_count() == 0  # off
    comm.configure(enabled=True)
    found = call_collectives()
    found["counted"] = {
        (name, size): values[0]
        for name, sizes in comm.comms_logger.get_raw_data().items()
        for size, values in sizes.items()
    }
    stats = comm.log_summary(show_straggler=True, return_dict=True)
    found["stragglers"] = {
        name: {size: row["count"] for size, row in sizes.items()}
        for name, sizes in stats["straggler_analysis"].items()
    }
    comm.reset_log()
    comm.configure(prof_all=False, prof_ops=["barrier"])
    comm.all_reduce(torch.ones(2))
    comm.barrier()
    comm.all_reduce(torch.ones(2), prof=True)
    found["chosen"] = comm.get_logged_comm_ops()
    comm.configure(enabled=False)
    return found


def test_collectives_and_their_log() -> None:
    for rank, found in enumerate(run_ranks(logged_collectives, 2)):
        assert found["sums"] == [18, 12, 6, 6, 6, 12, 12, 12]
        assert found["broadcast"] == [1.0, 1.0]
        assert found["received"] == [1.0 - rank] * 4
        assert found["counted"] == {
            ("all_reduce", 24): 1,  # all_reduce
            ("all_reduce", 12): 1,  # inference_all_reduce
            ("all_reduce", 48): 1,  # all_reduce_coalesced
            ("all_gather_into_tensor", 24): 1,
            ("reduce_scatter_tensor", 12): 1,
            ("all_gather", 24): 1,
            ("all_gather_coalesced", 24): 1,
            ("broadcast", 8): 1,
            ("batch_isend_irecv", 32): 1,
            ("my barrier", 0): 1,
        }
        assert found["stragglers"]["all_reduce"] == {24: 1, 12: 1, 48: 1}
        assert found["chosen"] == ["barrier", "all_reduce"]


CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


def engine_in_the_log(by_config: bool) -> dict[str, Any]:
    comm = deepspeed.comm
    more = {"comms_logger": {"enabled": True, "prof_all": True}} if by_config else {}
    if not by_config:
        comm.configure(enabled=True)
    engine, *_ = deepspeed.initialize(model=build("plain"), config={**CONFIG, **more})
    comm.reset_log()
    engine.backward(engine(micro_batch(0, engine.global_rank)))
    engine.step()
    counted = comm.log_summary(return_dict=True)["summary"]
    logged = {(row.operation, row.size_bytes): row for row in engine.comms_summary().rows}
    sizes = {size: row["count"] for size, row in counted["reduce_scatter"].items()}
    comm.configure(enabled=False)
    engine.backward(engine(micro_batch(1, engine.global_rank)))
    engine.step()
    comm.barrier()
    return {
        "names": set(counted),
        "matches": all(("reduce_scatter", 2 * size) in logged for size in sizes) and bool(sizes),
        "later": comm.get_comm_operation_count()
        == sum(row["count"] for each in counted.values() for row in each.values()),
    }


@pytest.mark.parametrize("by_config", [True, False])
def test_the_engine_is_in_the_log(by_config: bool) -> None:
    for found in run_ranks(engine_in_the_log, 2, by_config):
        assert {"all_gather", "reduce_scatter"} <= found["names"]
        assert found["matches"]
        assert found["later"]


def test_bandwidths(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "xds.deepspeed.utils.comms_logging._world_size"
    monkeypatch.setattr(module, lambda: 4)
    table = {  # Gbps of 1 MB in 1 ms, as DeepSpeed counts it
        "all_reduce": (16.0, 12.0),
        "all_gather_into_tensor": (32.0, 24.0),
        "reduce_scatter_tensor": (32.0, 24.0),
        "all_to_all_single": (8.0, 6.0),
        "broadcast": (8.0, 8.0),
        "isend": (8.0, 8.0),
        "gather": (8.0, 8.0),
    }
    for name, want in table.items():
        assert calc_bw_log(name, 1_000_000, 1.0) == pytest.approx(want), name
    for name in COLLECTIVES:
        assert len(calc_bw_log(name, 8, 1.0)) == 2, name
    with pytest.raises(xds.UsageError, match="comm_op = 'nothing'"):
        calc_bw_log("nothing", 8, 1.0)


def test_a_logger_by_itself(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger = CommsLogger()
    logger.start_profiling_op(["all_reduce", "broadcast"])
    logger.stop_profiling_op(["broadcast"])
    logger.stop_profiling_comms()
    assert (logger.prof_all, logger.prof_ops) == (False, ["all_reduce"])
    logger.verbose = True
    with caplog.at_level(logging.INFO, "xds"):
        for milliseconds in (3.0, 1.0, 2.0):
            logger.append("all_reduce", "mine", milliseconds, 2048)
    assert "comm op: mine | time (ms): 3.00 | msg size: 2.0 KB | algbw (Gbps): 0.01" in caplog.text
    summary = logger.get_operation_summary("mine")
    assert summary is not None
    assert summary[2048]["avg_latency_ms"] == 2.0
    assert logger.get_raw_data()["mine"][2048][1] == [3.0, 1.0, 2.0]
    assert logger.get_operation_summary("other") is None
    assert (logger.get_total_operations(), logger.get_operation_names()) == (3, ["mine"])
    found = logger.log_all(show_straggler=True, return_dict=True)
    assert found is not None
    assert found["straggler_analysis"]["mine"][2048]["total_straggler_ms"] == 0.0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Comm. Op            Message Size        Count               Total")
    assert lines[1:3] == ["mine", " " * 20 + "2.0 KB".ljust(20) + "3".ljust(20) + lines[2][60:]]
    assert convert_size(0) == "0B"
    assert get_caller_func(1) == "test_a_logger_by_itself"


def test_a_backend_takes_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def isend(**options: Any) -> Any:
        return options

    monkeypatch.setattr(deepspeed.comm.comm, "cdb", SimpleNamespace(isend=isend))
    assert deepspeed.comm.comm.isend("t", dst=1) == {"tensor": "t", "dst": 1}


def test_timers(caplog: pytest.LogCaptureFixture) -> None:
    timers = SynchronizedWallClockTimer()
    for _ in range(3):
        timers("data").start()
        time.sleep(0.001)
        timers("data").stop()
    assert timers("data").elapsed(reset=False) >= 3.0
    assert timers.get_mean(["data", "none"], normalizer=2)["data"] >= 0.5
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
    nothing = NoopTimer()
    nothing("x").start()
    nothing("x").stop(record=True)
    assert (nothing("x").elapsed(), nothing.get_timers()) == (0, {})


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


def test_trimmed_mean() -> None:
    data = [3.0, 1.0, 2.0]
    assert trim_mean(data, 0.1) == 2.0
    assert data == [3.0, 1.0, 2.0]
    assert trim_mean([], 0.1) == 0
    with pytest.raises(xds.UsageError, match="trim_percent"):
        trim_mean(data, 2.0)
