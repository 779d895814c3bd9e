"""Tests of the log of collectives: operations, sizes, counts, bandwidths, and moments of a device."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes

from xds.ops.comm.collectives import Collectives
from xds.ops.comm.message_log import (
    ALIASES,
    OPERATIONS,
    Clock,
    LogOptions,
    MessageLog,
    binary_size,
    bus_factor,
    gbps,
)
from xds.ops.comm.nccl import NcclBackend
from xds.ops.comm.opening import member_of, open_collectives, open_nccl

CPU = torch.device("cpu")


def test_bus_factors_of_nccl_tests() -> None:
    for factors, names in {
        (1.0, 1.75): ("all_reduce", "inference_all_reduce"),
        (0.5, 0.875): ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
        (1.0, 1.0): ("broadcast", "reduce", "send", "irecv"),
    }.items():
        for name in names:
            assert (bus_factor(name, 2), bus_factor(name, 8)) == factors, name
    assert bus_factor("all_gather_into_tensor", 8) == 0.875
    assert all(bus_factor(name, 3) > 0 for name in (*OPERATIONS, *ALIASES))
    assert gbps(1e9, 8.0) == 1000.0 and gbps(1e9, 0.0) == 0.0


def test_sizes_in_text() -> None:
    texts = [binary_size(size) for size in (0, 1, 1023, 1024, 1536, 711_639_040)]
    assert texts == ["0B", "1.0 B", "1023.0 B", "1.0 KB", "1.5 KB", "678.67 MB"]


def call_all(collectives: Collectives) -> None:
    """One call of everything, of fp32 tensors."""
    rank, world = collectives.rank, collectives.world_size
    flat, shard = torch.zeros(6 * world), torch.zeros(6)
    collectives.all_gather(flat, shard, buffer=0, kind="gather").wait()
    collectives.reduce_scatter(flat, shard, add=False, buffer=0, kind="reduce").wait()
    collectives.all_reduce(torch.zeros(10), what="x", kind="tensor").wait()
    collectives.sum(torch.zeros(3), what="x", kind="tensor")
    uneven = (
        0 if isinstance(collectives.backend, NcclBackend) else 1
    )  # gloo's own takes equal parts alone
    parts = [torch.zeros(2 + uneven * peer) for peer in range(world)]
    outs = [torch.zeros(2 + uneven * rank) for _ in range(world)]
    collectives.all_to_all(outs, parts, what="x", kind="tokens").wait()
    collectives.gather_small(torch.zeros(2))
    collectives.broadcast(torch.zeros(5))
    collectives.barrier()
    if rank == 0:
        collectives.send(torch.zeros(7), 1, what="x", kind="pipe").wait()
    if rank == 1:
        collectives.receive(torch.zeros(7), 0, what="x").wait()


def logged(native: bool, options: LogOptions | None) -> dict[tuple[str, int, int], int]:
    group = dist.group.WORLD
    assert group is not None
    collectives = open_nccl(member_of(group, CPU)) if native else open_collectives(group, CPU)
    log = collectives.message_log
    if options is not None:
        log.configure(options, enabled=True)
    call_all(collectives)
    found = {}
    for key, row in log.rows().items():
        assert 0 < row.total_milliseconds
        assert 0 <= row.waited_milliseconds <= row.total_milliseconds
        found[key.label, key.size_bytes, len(key.members)] = row.count
    return found


@pytest.mark.parametrize("native", [False, True])
def test_operations_and_whole_sizes(native: bool, world: int = 3) -> None:
    results = run_processes(logged, world, native, LogOptions())
    for rank, found in enumerate(results):
        want = {
            ("all_gather", 24 * world, world): 1,
            ("reduce_scatter", 24 * world, world): 1,
            ("all_reduce", 40, world): 1,
            ("all_reduce", 12, world): 1,
            ("all_to_all", 4 * sum(2 + (not native) * peer for peer in range(world)), world): 1,
            ("all_gather", 8 * world, world): 1,
            ("broadcast", 20, world): 1,
            ("barrier", 0, world): 1,
        }
        if rank < 2:
            want["send" if rank == 0 else "receive", 28, 2] = 1
        assert found == want


def test_off_chosen_and_with_the_subject() -> None:
    assert run_processes(logged, 2, False, None) == [{}, {}]
    chosen = LogOptions(prof_all=False, prof_ops=("all_gather_into_tensor", "broadcast"))
    for found in run_processes(logged, 2, False, chosen):
        assert {operation for operation, *_ in found} == {"all_gather", "broadcast"}
    labels = {label for label, *_ in run_processes(logged, 2, False, LogOptions(debug=True))[0]}
    assert {"all_gather | [flat buffer 0]", "all_gather | [norms and flags]"} <= labels
    assert "send | [x]" in labels


class Ticks(Clock):
    """Every moment is one after the last; those up to `reached` are over."""

    def __init__(self) -> None:
        self.count = self.reached = 0

    def now(self) -> Any:
        self.count += 1
        return self.count

    def is_over(self, moment: Any) -> bool:
        return bool(moment <= self.reached)

    def milliseconds(self, start: Any, end: Any) -> float:
        self.reached = max(self.reached, end)
        return float(end - start)


def test_moments_of_a_device_are_read_when_they_are_over(caplog: pytest.LogCaptureFixture) -> None:
    clock = Ticks()
    log = MessageLog(0, clock)
    log.configure(LogOptions(verbose=True), enabled=True)
    first = log.start("all_reduce", 2048, (0, 1), "x")
    second = log.start("broadcast", 0, (0, 1), "x")
    assert first is not None
    assert second is not None
    first.begin_wait()
    first.begin_wait()
    with caplog.at_level(logging.INFO, "xds"):
        first.end()
        first.end()
        second.end()  # it never waited: all its time counts
        assert not caplog.records  # the device has not reached their ends
        found = {key.label: row for key, row in log.rows().items()}
    assert [record.getMessage() for record in caplog.records] == [
        "comm op: all_reduce | time (ms): 3.00 | msg size: 2.0 KB | algbw (Gbps): 0.01 | busbw (Gbps): 0.01",
        "comm op: broadcast | time (ms): 3.00 | msg size: 0B | algbw (Gbps): 0.00 | busbw (Gbps): 0.00",
    ]
    assert (found["all_reduce"].total_milliseconds, found["all_reduce"].waited_milliseconds) == (
        3,
        1,
    )
    assert found["broadcast"].waited_milliseconds == 3
    log.reset()
    assert log.rows() == {}
