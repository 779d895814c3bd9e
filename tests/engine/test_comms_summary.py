"""Tests of engine.comms_summary(): the log has each byte that the engine sends, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import run_ranks
from models import build, micro_batch

import xds
from xds.ops.comm.message_log import bus_factor


def train(config: dict[str, Any]) -> tuple[xds.Engine, int]:
    """An engine after two steps, and the bytes that it sent."""
    engine = xds.initialize(build("plain"), {"train_micro_batch_size_per_gpu": 4, **config})
    for step in range(2):
        engine.backward(engine(micro_batch(step, engine.global_rank)))
        engine.step()
    return engine, sum(engine.bytes_sent().values())


def summed(config: dict[str, Any]) -> dict[str, Any]:
    engine, sent = train(config)
    summary = engine.comms_summary(show_straggler=True)
    logged = sum(
        row.count * row.size_bytes * bus_factor(row.operation, row.num_ranks)
        for row in summary.rows
        if row.operation != "broadcast" or engine.global_rank == 0
    )
    assert summary.stragglers is not None
    for row, straggler in zip(summary.rows, summary.stragglers, strict=True):
        assert (row.operation, row.size_bytes) == (straggler.operation, straggler.size_bytes)
        assert row.count == straggler.count
        assert straggler.straggler_milliseconds >= 0
    lines = str(summary).splitlines()
    assert (
        lines[0].split()
        == (
            "Comm. Op Message Size Count Total Latency(ms) Avg Latency(ms) tput_avg (Gbps) busbw_avg (Gbps) "
            "Avg Wait(ms)"
        ).split()
    )
    assert lines[1] == "all_gather"
    assert "Breakdown with straggler effect" in lines
    return {"logged": logged, "sent": sent}


def at_several_stages() -> None:
    for zero in ({"stage": 0}, {"stage": 2}, {"stage": 3, "zero_quantized_gradients": True}):
        config = {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "comms_logger": {"enabled": True},
            "zero_optimization": zero,
        }
        found = summed(config)
        assert found["logged"] == found["sent"] > 0, zero
    engine, _ = train({"optimizer": {"type": "SGD"}})
    with pytest.raises(xds.UsageError, match=r"set comms_logger\.enabled to true"):
        engine.comms_summary()


def test_the_log_has_every_byte() -> None:
    run_ranks(at_several_stages, 2)
