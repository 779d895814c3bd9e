"""What each rank of `xds bench comm` runs: checks the result of each collective, then times it.

Rank 0 prints a line for each. Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md): algbw is size /
time, busbw is the traffic of each rank's link in one direction. "of link" is busbw over the speed of plain
messages between two ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.process.process import join, pick_device
from ..ops.comm import nccl as raw
from ..ops.comm.collectives import Collectives
from ..ops.comm.exchange import host_numbers
from ..ops.comm.handles import Handle
from ..ops.comm.opening import open_collectives
from ..ops.device import device_of
from ..utils.errors import XdsError
from .bench import BenchPlan

_FACTOR = 4  # from one size to the next
_LINK_BYTES = 32 << 20
_ROUNDS = 3
_ROW_SECONDS = 0.5  # fewer calls are timed if they take longer
_DEFAULT_GPU_BYTES, _DEFAULT_CPU_BYTES = 1 << 30, 64 << 20
_HEADING = (
    f"{'collective':<15}{'by':<6}{'bytes':>12}{'ms':>10}{'algbw':>8}{'busbw':>8}{'of link':>9}"
)

Call = Callable[[], object]


@final
@dataclass(frozen=True)
class BenchRow:
    """One collective at one size. seconds: of a call, on the slowest rank. of_link: None for one rank."""

    op: str
    by: str
    size_bytes: int
    seconds: float
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float
    of_link: float | None

    def __str__(self) -> str:
        speeds = (self.algorithm_bytes_per_second, self.bus_bytes_per_second)
        shown = "".join(f"{speed / 1e9:>8.3f}" for speed in speeds)
        of_link = "-" if self.of_link is None else f"{self.of_link:.2f}"
        head = f"{self.op:<15}{self.by:<6}{self.size_bytes:>12}{self.seconds * 1e3:>10.3f}"
        return f"{head}{shown}{of_link:>9}"


def bus_factor(op: str, world_size: int) -> float:
    """Bus bandwidth divided by algorithm bandwidth, as in nccl-tests. The size is that of the full tensor."""
    if op in ("broadcast", "send_recv"):
        return float(world_size > 1)
    share = (world_size - 1) / world_size
    return 2 * share if op == "all_reduce" else share


def run_rank(plan: BenchPlan) -> None:
    """Run one rank. Rank 0 prints the table, or one line of JSON."""
    is_cpu = os.environ.get("XDS_BACKEND") in ("gloo", "mpi")
    device = torch.device("cpu") if is_cpu else pick_device()
    group = join(device)
    where, is_host = open_collectives(group, device), device.type == "cpu"
    hosts = host_numbers(where)
    bench = Bench(where, group, plan)
    facts = {
        "backend": str(dist.get_backend(group)),
        "world_size": where.world_size,
        "num_hosts": len(set(hosts)),
        "device": "CPU" if is_host else device_of(device).name,
        "dtype": plan.dtype,
        "link_bytes_per_second": bench.measure_link(hosts),
    }
    shows = where.rank == 0 and not plan.is_json
    if shows:
        print(", ".join(f"{key} {value}" for key, value in facts.items()))
        print(f"GB/s of 10^9 bytes, times of the slowest rank\n{_HEADING}", flush=True)
    rows = []
    for row in bench.rows():
        rows.append(row)
        if shows:
            print(row, flush=True)
    if where.rank == 0 and plan.is_json:
        print(json.dumps({**facts, "rows": [asdict(row) for row in rows]}), flush=True)


@final
class Bench:
    """The collectives of one group: each is checked, then timed. All ranks call the methods alike."""

    def __init__(self, where: Collectives, group: Any, plan: BenchPlan) -> None:
        self._where, self._group, self._plan = where, group, plan
        self._dtype: torch.dtype = getattr(torch, plan.dtype)
        is_host = where.device.type == "cpu"
        default = _DEFAULT_CPU_BYTES if is_host else _DEFAULT_GPU_BYTES
        self._max_bytes = plan.max_bytes or max(default, plan.min_bytes)
        self._link = 0.0

    def measure_link(self, hosts: Sequence[int]) -> float:
        """Bytes per second of plain messages from rank 0 to the first rank of another host, or to rank 1."""
        where = self._where
        if where.world_size == 1:
            return 0.0
        peer = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)
        tensor = where.empty(_LINK_BYTES, torch.uint8)

        def call() -> None:
            raw.send_to(self._group, tensor, 0, peer)

        self._slowest(call, 1)
        self._link = _LINK_BYTES / self._seconds(call)
        return self._link

    def rows(self, ways: Sequence[str] = ("xds", "torch")) -> Iterator[BenchRow]:
        """Yield a row for each op, way and size. Raises XdsError if a result is wrong."""
        size = self._where.world_size
        for op in [op for op in self._plan.ops if size > 1 or op != "send_recv"]:
            for by in ways if op != "broadcast" else ways[:1]:  # which is the backend's own
                asked = self._plan.min_bytes
                while True:
                    numel = max(1, asked // (size * self._dtype.itemsize)) * size
                    yield self._row(op, by, numel)
                    if asked >= self._max_bytes:
                        break
                    asked = min(asked * _FACTOR, self._max_bytes)

    def overlap(self, op: str) -> float:
        """The share of an operation's time that runs beside computation of the same rank, 0 to 1."""
        where, numel = self._where, self._max_bytes // self._dtype.itemsize
        whole = where.empty(numel, self._dtype).zero_()
        shard = where.empty(numel // where.world_size, self._dtype).zero_()
        left = torch.ones(256, 256, device=where.device)

        def start() -> Handle:
            if op == "all_gather":
                return where.all_gather(whole, shard, buffer=0, kind="bench")
            return where.reduce_scatter(whole, shard, add=False, buffer=0, kind="bench")

        def compute() -> None:
            for _ in range(number):
                torch.mm(left, left)

        def both() -> None:
            handle = start()
            compute()
            handle.wait()

        alone = self._seconds(lambda: start().wait())
        number = 1
        number = max(1, int(1.5 * alone / self._seconds(compute)))
        beside = self._seconds(compute)
        return min(max((alone + beside - self._seconds(both)) / alone, 0.0), 1.0)

    def _row(self, op: str, by: str, numel: int) -> BenchRow:
        size_bytes = numel * self._dtype.itemsize
        call, result, expected = self._case(op, by, numel)
        call()
        wrong = self._all_values(float(not torch.equal(result, expected)))
        if any(wrong):
            ranks = ", ".join(str(rank) for rank, is_wrong in enumerate(wrong) if is_wrong)
            raise XdsError(
                f"{op} by {by}, {size_bytes} bytes: a wrong result on rank {ranks} of {len(wrong)}; data that"
                " these ranks send cannot be trusted: check for faulty memory, network adapters or a"
                " broken backend"
            )
        seconds = self._seconds(call)
        speed = size_bytes / seconds
        bus = speed * bus_factor(op, self._where.world_size)
        return BenchRow(
            op, by, size_bytes, seconds, speed, bus, bus / self._link if self._link else None
        )

    def _case(self, op: str, by: str, numel: int) -> tuple[Call, Tensor, Tensor]:
        """The call, the tensor that it writes, and what must be in it afterwards.

        Values are whole numbers that every dtype represents. Of a sum, all summands but one are 0: it is
        exact, and wrong if a rank is missing or counted twice.
        """
        where = self._where
        size, rank, part = where.world_size, where.rank, numel // where.world_size
        index = torch.arange(part, device=where.device) % 113

        def values(*parts: int) -> Tensor:
            return torch.cat([1 + (31 * index + 17 * each) % 113 for each in parts])

        everything, own = values(*range(size)), values(rank)
        summand = everything * (torch.arange(numel, device=where.device) % size == rank)
        contents = {  # what is sent, and what must arrive
            "all_gather": (own, everything),
            "reduce_scatter": (summand, own),
            "all_reduce": (summand, everything),
            "all_to_all": (
                values(*(rank * size + peer for peer in range(size))),
                values(*(peer * size + rank for peer in range(size))),
            ),
            "broadcast": (everything * (rank == 0), everything),
            "send_recv": (everything + rank, everything + (rank - 1) % size),
        }
        sent, expected = (content.to(self._dtype) for content in contents[op])
        # memory that peers read in place, where they can
        source = where.empty(sent.numel(), self._dtype).copy_(sent)
        target = where.empty(expected.numel(), self._dtype).zero_()
        if op == "all_reduce":  # in place: later calls sum what is there
            target.copy_(sent)
        calls = self._of_xds(source, target) if by == "xds" else self._of_torch(source, target)
        result = source if op == "broadcast" else target
        return calls[op], result, expected

    def _of_xds(self, source: Tensor, target: Tensor) -> dict[str, Call]:
        where = self._where
        size, rank = where.world_size, where.rank

        def reduce_scatter(whole: Tensor, out: Tensor) -> None:
            where.reduce_scatter(whole, out, add=False, buffer=0, kind="bench").wait()

        def all_reduce() -> None:  # as in a step of ZeRO stages 1 and 2
            shard = where.shard_of(target)
            reduce_scatter(target, shard)
            where.all_gather(target, shard, buffer=0, kind="bench").wait()

        def all_to_all() -> None:
            outs, parts = list(target.chunk(size)), list(source.chunk(size))
            where.all_to_all(outs, parts, what="bench", kind="bench").wait()

        def send() -> Handle:
            return where.send(source, (rank + 1) % size, what="bench", kind="bench")

        def exchange() -> None:
            # NCCL runs them in the order of their starts: not all ranks may start with sending
            first = None if rank % 2 else send()
            received = where.receive(target, (rank - 1) % size, what="bench")
            sending = first or send()
            received.wait()
            sending.wait()

        return {
            "all_gather": lambda: where.all_gather(target, source, buffer=0, kind="bench").wait(),
            "reduce_scatter": lambda: reduce_scatter(source, target),
            "all_reduce": all_reduce,
            "all_to_all": all_to_all,
            "broadcast": lambda: where.broadcast(source),
            "send_recv": exchange,
        }

    def _of_torch(self, source: Tensor, target: Tensor) -> dict[str, Call]:
        group = self._group
        return {
            "all_gather": lambda: raw.all_gather(group, target, source),
            "reduce_scatter": lambda: raw.reduce_scatter(group, source, target),
            "all_reduce": lambda: raw.all_reduce(group, target),
            "all_to_all": lambda: raw.all_to_all(group, source, target),
            "send_recv": lambda: raw.send_right(group, source, target),
        }

    def _seconds(self, call: Call) -> float:
        """Of one call: the slowest rank, the median of the rounds."""
        first = self._slowest(call, 1)
        trials = max(1, min(self._plan.trials, int(_ROW_SECONDS / max(first, 1e-9))))
        return statistics.median(self._slowest(call, trials) for _ in range(_ROUNDS))

    def _slowest(self, call: Call, trials: int) -> float:
        self._where.barrier()
        self._finish()
        start = time.perf_counter()
        for _ in range(trials):
            call()
        self._finish()
        return max(self._all_values((time.perf_counter() - start) / trials))

    def _finish(self) -> None:
        device_of(self._where.device).synchronize()

    def _all_values(self, value: float) -> list[float]:
        """Every rank's value, on every rank."""
        own = torch.tensor([value], dtype=torch.float64, device=self._where.device)
        return [float(each) for each in self._where.gather_small(own).flatten().tolist()]


if __name__ == "__main__":
    run_rank(BenchPlan(**json.loads(sys.argv[1])))
