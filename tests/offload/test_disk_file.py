"""A disk file: bytes come back, in which order requests are served, and nothing remains after its end."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from time_limit import limit_time  # noqa: F401

from xds.offload import pinned
from xds.offload.disk import workers
from xds.offload.disk.extents import Extent, Extents
from xds.offload.disk.file import DiskFile
from xds.offload.disk.options import ALIGN_BYTES, DiskOptions, aligned
from xds.offload.pinned import host_memory
from xds.utils.errors import UsageError, XdsError

SMALL = DiskOptions(block_bytes=8192, queue_depth=4)


def pages(num_bytes: int, seed: int | None = None) -> torch.Tensor:
    memory = host_memory(aligned(num_bytes), pin=False)
    if seed is not None:
        memory.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return memory


def file_of(folder, *sizes, options=SMALL) -> tuple[DiskFile, list[Extent]]:
    extents = Extents()
    for number, size in enumerate(sizes):
        extents.add(f"state {number}", size)
    return DiskFile(folder, extents.total_bytes, options, rank=0), list(extents)


def open_files() -> set[str]:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.lexists(link)}


def disk_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("xds-disk")]


@pytest.fixture
def gate(monkeypatch):
    """Blocks of `gate.held`, "read" or "write", are transferred when the event is set."""
    opened, transfer = threading.Event(), workers._transfer
    opened.held = "write"

    def wait_first(fd, request, begin, end):
        if request.operation == opened.held:
            opened.wait(10)
        transfer(fd, request, begin, end)

    monkeypatch.setattr(workers, "_transfer", wait_first)
    yield opened
    opened.set()


@pytest.mark.parametrize(
    "options", [SMALL, DiskOptions(block_bytes=4096, queue_depth=1), DiskOptions()]
)
def test_random_extents_come_back_in_random_order(tmp_path, options):
    chance = random.Random(options.block_bytes)
    sizes = [chance.choice([1, 4096, 5000, 70_000, 300_001]) for _ in range(30)]
    disk, extents = file_of(tmp_path, *sizes, options=options)
    sources = {extent: pages(extent.num_bytes, seed) for seed, extent in enumerate(extents)}
    copies = {extent: pages(extent.num_bytes) for extent in extents}
    chance.shuffle(extents)
    for extent in extents:
        disk.write(extent, sources[extent])
    chance.shuffle(extents)
    tickets = [disk.read(extent, copies[extent]) for extent in extents]
    for ticket in tickets:
        ticket.wait()
        assert ticket.is_done()
    assert all(torch.equal(sources[extent], copies[extent]) for extent in extents)
    disk.close()


def test_requests_of_many_threads_come_back(tmp_path):
    disk, extents = file_of(tmp_path, *[40_000] * 8)
    wrong = []

    def work(seed):
        extent, copy = extents[seed], pages(40_000)
        for turn in range(10):
            source = pages(40_000, 100 * turn + seed)
            disk.write(extent, source)
            disk.read(extent, copy).wait()
            wrong.extend([] if torch.equal(source, copy) else [(seed, turn)])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    disk.close()


def test_a_part_of_an_extent_is_written_and_read(tmp_path):
    disk, (before, extent, after) = file_of(tmp_path, 4096, 50_000, 4096)
    whole, part = pages(50_000, 1), pages(12_288, 2)
    disk.write(before, pages(1, 3)).wait()
    disk.write(after, pages(1, 4)).wait()
    disk.write(extent, whole)
    disk.write(extent, part, start=16_384)
    whole[16_384 : 16_384 + 12_288] = part
    copy, end = pages(50_000), pages(4096)
    disk.read(extent, copy).wait()
    disk.read(extent, end, start=49_152).wait()
    assert torch.equal(copy, whole) and torch.equal(end, whole[49_152:])
    for neighbour, seed in ((before, 3), (after, 4)):
        disk.read(neighbour, end).wait()
        assert torch.equal(end, pages(1, seed))
    disk.close()


# -- order ----------------------------------------------------------------------------------------------


def test_requests_that_overlap_are_served_in_the_order_of_submission(tmp_path):
    """Also where parts of an extent overlap: the file equals memory in which each write was done at once."""
    disk, (extent,) = file_of(tmp_path, 64 * ALIGN_BYTES, options=DiskOptions(ALIGN_BYTES, 8))
    expected = torch.zeros(64 * ALIGN_BYTES, dtype=torch.uint8)
    chance, checks = random.Random(0), []
    for seed in range(300):
        first, last = sorted(chance.sample(range(65), 2))
        span = slice(first * ALIGN_BYTES, last * ALIGN_BYTES)
        if seed % 2:
            source = pages(span.stop - span.start, seed)
            disk.write(extent, source, start=span.start)
            expected[span] = source
        else:
            copy = pages(span.stop - span.start)
            checks.append((disk.read(extent, copy, start=span.start), copy, expected[span].clone()))
    for ticket, copy, then in checks:
        ticket.wait()
        assert torch.equal(copy, then)
    disk.close()


def test_requests_that_do_not_overlap_pass_one_that_waits(tmp_path, gate):
    disk, (first, second) = file_of(tmp_path, 8192, 4096, options=DiskOptions(4096, 3))
    source, copy = pages(8192, 1), pages(4096)
    slow = disk.write(first, source)  # occupies two threads
    behind = disk.read(first, copy, start=4096)
    disk.read(second, pages(4096)).wait()
    assert not slow.is_done() and not behind.is_done()
    gate.set()
    behind.wait()
    slow.wait()
    assert torch.equal(copy, source[4096:])
    disk.close()


def test_reads_of_the_same_bytes_do_not_wait_for_each_other(tmp_path, gate):
    gate.held = "read"
    disk, (extent,) = file_of(tmp_path, 4096)
    tickets = [disk.read(extent, pages(4096)) for _ in range(4)]
    while len(disk._workers._in_flight) < 4:
        time.sleep(0.001)
    gate.set()
    for ticket in tickets:
        ticket.wait()
    disk.close()


# -- requests that are refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "memory, start, what",
    [
        (lambda: pages(4096)[:4000], 0, "not aligned"),
        (lambda: pages(8192)[512:4608], 0, "the memory is not aligned"),
        (lambda: pages(4096), 512, "not aligned"),
        (lambda: pages(8192), 4096, "outside"),
        (lambda: pages(4096), 8192, "outside"),
        (lambda: pages(4096), -4096, "outside"),
        (lambda: pages(4096).view(torch.float32), 0, "uint8"),
        (lambda: pages(4096).view(2, 2048), 0, "flat"),
        (lambda: pages(8192)[::2], 0, "flat"),
        (lambda: torch.empty(4096, dtype=torch.uint8, device="meta"), 0, "host"),
    ],
)
def test_a_request_that_cannot_work_is_refused(tmp_path, memory, start, what):
    disk, (extent, _) = file_of(tmp_path, 5000, 100)
    for request in (disk.read, disk.write):
        with pytest.raises(XdsError, match=f"internal error.*extent state 0.*{what}"):
            request(extent, memory(), start)
    disk.close()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"block_bytes": 5000}, "aio.block_size = 5000.*multiple of 4096 bytes, such as 8192"),
        ({"block_bytes": 0}, "aio.block_size = 0.*such as 4096"),
        ({"queue_depth": 0}, "aio.queue_depth = 0"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        DiskOptions(**options)


# -- the end --------------------------------------------------------------------------------------------


def test_close_serves_what_was_submitted_and_leaves_nothing(tmp_path):
    disk, (extent,) = file_of(tmp_path, 1 << 20, options=DiskOptions(4096, 3))
    copy, source = pages(1 << 20), pages(1 << 20, 1)
    assert len(disk_threads()) == 3
    assert [name for name in open_files() if name.startswith(str(tmp_path))]
    disk.write(extent, source)
    disk.read(extent, copy)
    disk.close()
    disk.close()
    assert torch.equal(source, copy)
    assert not disk_threads()
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]
    with pytest.raises(XdsError, match="closed"):
        disk.read(extent, copy)


def test_a_file_without_references_ends(tmp_path):
    disk, (extent,) = file_of(tmp_path, 4096)
    ticket = disk.write(extent, pages(4096, 1))
    del disk
    gc.collect()
    ticket.wait()
    assert disk_threads()  # the ticket keeps it
    del ticket
    gc.collect()
    assert not disk_threads()
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]


def test_a_finished_request_gives_up_its_memory(tmp_path, monkeypatch):
    freed = []
    monkeypatch.setattr(pinned, "_release", lambda *_: freed.append(True))
    disk, (extent,) = file_of(tmp_path, 4096)
    memory = pages(4096, 1)
    ticket = disk.write(extent, memory)
    del memory
    ticket.wait()
    while not freed:  # a thread drops it just after it has told the ticket
        time.sleep(0.001)
    disk.close()


def test_a_forked_process_closes_its_copy_alone(tmp_path):
    disk, (extent,) = file_of(tmp_path, 4096)
    disk.write(extent, pages(4096, 1)).wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads, Python 3.12
        pid = os.fork()
    if pid == 0:
        del disk
        gc.collect()
        os._exit(len([name for name in open_files() if name.startswith(str(tmp_path))]))
    assert os.waitpid(pid, 0)[1] == 0
    copy = pages(4096)
    disk.read(extent, copy).wait()
    assert torch.equal(copy, pages(4096, 1))
    disk.close()


SCRIPT = """
import sys
from pathlib import Path
from xds.offload.disk.extents import Extents
from xds.offload.disk.file import DiskFile
from xds.offload.disk.options import DiskOptions
from xds.offload.pinned import host_memory
extents = Extents()
extent = extents.add("all", 64 << 20)
disk = DiskFile(Path(sys.argv[1]), extents.total_bytes, DiskOptions(), rank=3)
source = host_memory(64 << 20, pin=False)
print("ready", flush=True)
for _ in range(int(sys.argv[2])):
    tickets = [disk.write(extent, source) for _ in range(4)]
    tickets[0].wait()
"""


def run_script(folder, num_rounds, *flags):
    command = [sys.executable, *flags, "-c", SCRIPT, str(folder), str(num_rounds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_ends_with_requests_in_flight_and_without_a_word(tmp_path):
    """Under `-X dev`, which reports what was not closed."""
    process = run_script(tmp_path, 1, "-X", "dev", "-W", "error")
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out, said) == (0, "ready\n", "")
