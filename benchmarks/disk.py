"""Time reads and writes of a `DiskFile` against the same system calls in bare threads.

    python benchmarks/disk.py [--folder .] [--gib 1] [--rounds 9] [--quick]

Both use direct I/O with the same blocks at the same depth, each on a file of its own that was written once
before, and take turns. A turn transfers all bytes. The folder has to be on the disk that is to be measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from torch import Tensor

from xds.offload.disk.creation import create_file
from xds.offload.disk.extents import Extent, Extents
from xds.offload.disk.file import DiskFile
from xds.offload.disk.options import DiskOptions
from xds.offload.pinned import host_memory

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from harness import Row, Watch, finish, ratio_row  # noqa: E402

MIB = 1 << 20
NUM_SLOTS = 4  # of an extent each, in host memory: extents use them in turn
SETTINGS = ((64 * MIB, MIB, 8), (256 * MIB, MIB, 8), (64 * MIB, 8 * MIB, 4))
MUST = 0.90


@dataclass
class Turns:
    """What the turns of one contestant took."""

    gb_per_second: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


class Bare:
    """System calls in `depth` threads, without anything else."""

    def __init__(self, folder: Path, total_bytes: int, options: DiskOptions, slots: list[Tensor]):
        self._fd = create_file(folder, total_bytes, 0).fd
        self._total_bytes = total_bytes
        self._options = options
        self._views = [memoryview(slot.numpy()) for slot in slots]

    def run(self, operation: str) -> None:
        call = os.preadv if operation == "read" else os.pwritev
        block_bytes, offsets = self._options.block_bytes, self._offsets()

        def serve() -> None:
            for offset, view, at in offsets:
                if call(self._fd, [view[at : at + block_bytes]], offset) != block_bytes:
                    raise RuntimeError("a partial transfer: the turns cannot be compared")

        threads = [threading.Thread(target=serve) for _ in range(self._options.queue_depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _offsets(self) -> Iterator[tuple[int, memoryview, int]]:
        """Every block. One iterator of C code, which threads can share."""
        size, block_bytes = len(self._views[0]), self._options.block_bytes
        per_extent = (
            [
                (start + at, self._views[number % NUM_SLOTS], at)
                for at in range(0, size, block_bytes)
            ]
            for number, start in enumerate(range(0, self._total_bytes, size))
        )
        return iter(list(chain.from_iterable(per_extent)))

    def close(self) -> None:
        os.close(self._fd)


class Ours:
    """A `DiskFile`. All requests are submitted, or each one waits for the one before."""

    def __init__(
        self, disk: DiskFile, extents: list[Extent], slots: list[Tensor], *, at_once: bool
    ):
        self._disk, self._extents, self._slots = disk, extents, slots
        self._at_once = at_once

    def run(self, operation: str) -> None:
        submit = self._disk.read if operation == "read" else self._disk.write
        tickets = []
        for number, extent in enumerate(self._extents):
            tickets.append(submit(extent, self._slots[number % NUM_SLOTS]))
            if not self._at_once:
                tickets.pop().wait()
        for ticket in tickets:
            ticket.wait()


def beside_python(run: Callable[[str], None]) -> Callable[[str], None]:
    """`run`, while another thread runs Python code and gives up the interpreter's lock every 5 ms only."""

    def run_beside(operation: str) -> None:
        is_over = False

        def spin() -> None:
            while not is_over:
                pass

        thread = threading.Thread(target=spin)
        thread.start()
        run(operation)
        is_over = True
        thread.join()

    return run_beside


def take_turns(
    runs: dict[str, Callable[[str], None]], operation: str, total_bytes: int, rounds: int
) -> dict[str, Turns]:
    turns = {name: Turns() for name in runs}
    names = list(runs)
    for turn in range(rounds + 1):
        for name in names if turn % 2 else reversed(names):
            start, cpu = time.perf_counter(), time.process_time()
            runs[name](operation)
            seconds = time.perf_counter() - start
            if turn:  # the first round warms up
                turns[name].gb_per_second.append(total_bytes / seconds / 1e9)
                turns[name].cpu_seconds.append(time.process_time() - cpu)
    return turns


def rows_of(
    folder: Path, total_bytes: int, rounds: int, setting: tuple[int, int, int]
) -> list[Row]:
    extent_bytes, block_bytes, depth = setting
    total_bytes -= total_bytes % extent_bytes
    options = DiskOptions(block_bytes, depth)
    memory = host_memory(NUM_SLOTS * extent_bytes, pin=False).random_(0, 256)
    slots = list(memory.split(extent_bytes))
    extents = Extents()
    for number in range(total_bytes // extent_bytes):
        extents.add(str(number), extent_bytes)
    bare = Bare(folder, total_bytes, options, slots)
    disk = DiskFile(folder, total_bytes, options, rank=0)
    runs = {
        "bare": bare.run,
        "ours": Ours(disk, list(extents), slots, at_once=True).run,
        "one": Ours(disk, list(extents), slots, at_once=False).run,
    }
    runs["python"] = beside_python(runs["ours"])
    for run in (runs["bare"], runs["ours"]):
        run("write")
    rows = []
    what = (
        f"extents of {extent_bytes // MIB} MiB, blocks of {block_bytes // MIB} MiB, depth {depth}"
    )
    for operation in ("write", "read"):
        with Watch() as watch:
            turns = take_turns(runs, operation, total_bytes, rounds)
        speeds = {name: one.gb_per_second for name, one in turns.items()}
        bars = {"must": MUST, "more_is_better": True}
        row = ratio_row(f"{operation} / bare, {what}", speeds["ours"], speeds["bare"], **bars)
        cpu = [statistics.median(turns[name].cpu_seconds) for name in ("ours", "bare")]
        gib = total_bytes / (1 << 30)
        row.note = f"bare {statistics.median(speeds['bare']):.2f} GB/s; processor " + " and ".join(
            f"{seconds / gib:.3f}" for seconds in cpu
        )
        row.note += " s a GiB, ours and bare"
        row.others_busy = watch.others
        row.samples = speeds
        rows.append(row)
        for name, more in (("one", "one at a time"), ("python", "beside a thread of Python code")):
            rows.append(
                ratio_row(f"{operation} / bare, {what}, {more}", speeds[name], speeds["bare"])
            )
    disk.close()
    bare.close()
    return rows


def main() -> int:
    """Run every setting; 1 if a row misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to be measured")
    parser.add_argument("--gib", type=float, default=1.0, help="transferred in a turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="two rounds; nothing is kept")
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="disk-") as folder:
        for setting in SETTINGS:
            rows += rows_of(Path(folder), int(options.gib * (1 << 30)), rounds, setting)
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
