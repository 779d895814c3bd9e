"""The file of a rank on a disk: its creation, the order of reads and writes, failures, and its end."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from broken_disk import READ_CALLS, SPACE_CALLS, BrokenDisk
from time_limit import limit_time  # noqa: F401

from xds.offload.disk import workers
from xds.offload.disk.creation import create_file
from xds.offload.disk.extents import Extent, Extents
from xds.offload.disk.file import DiskFile
from xds.offload.disk.lru_cache import WRITES_IN_FLIGHT, Evictable, LruCache
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


def test_extents_follow_each_other_at_multiples_of_4096():
    for sizes, offsets, total_bytes in (
        ([], [], 0),
        ([4097, 1], [0, 8192], 12_288),
        ([4095, 4096, 4097, 0, 12], [0, 4096, 8192, 16_384, 16_384], 20_480),
    ):
        extents = Extents()
        given = [extents.add(f"state {number}", size) for number, size in enumerate(sizes)]
        assert [one.offset for one in given] == offsets
        assert extents.total_bytes == sum(one.padded_bytes for one in given) == total_bytes
        assert list(extents) == given and all(extents[one.name] == one for one in given)
    with pytest.raises(AssertionError, match="state 0"):
        extents.add("state 0", 10)


@pytest.mark.parametrize("options", [SMALL, DiskOptions()])
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
    handles = [disk.read(extent, copies[extent]) for extent in extents]
    for pending in handles:
        pending.wait()
        assert pending.is_done()
    assert all(torch.equal(sources[extent], copies[extent]) for extent in extents)
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
    for pending, copy, then in checks:
        pending.wait()
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


def test_requests_and_options_that_cannot_work_are_refused(tmp_path):
    disk, (extent, _) = file_of(tmp_path, 5000, 100)
    for memory, start, what in (
        (pages(4096)[:4000], 0, "not aligned"),
        (pages(8192)[512:4608], 0, "the memory is not aligned"),
        (pages(4096), 512, "not aligned"),
        (pages(8192), 4096, "outside"),
        (pages(4096), -4096, "outside"),
        (pages(4096).view(torch.float32), 0, "uint8"),
        (pages(8192)[::2], 0, "flat"),
        (torch.empty(4096, dtype=torch.uint8, device="meta"), 0, "host"),
    ):
        for request in (disk.read, disk.write):
            with pytest.raises(XdsError, match=f"internal error.*extent state 0.*{what}"):
                request(extent, memory, start)
    disk.close()
    for options, said in (
        ({"block_bytes": 5000}, "aio.block_size = 5000.*multiple of 4096 bytes, such as 8192"),
        ({"block_bytes": 0}, "aio.block_size = 0.*such as 4096"),
        ({"queue_depth": 0}, "aio.queue_depth = 0"),
    ):
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
    pending = disk.write(extent, pages(4096, 1))
    del disk
    gc.collect()
    pending.wait()
    assert disk_threads()  # the pending keeps it
    del pending
    gc.collect()
    assert not disk_threads()
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]


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
    handles = [disk.write(extent, source) for _ in range(4)]
    handles[0].wait()
"""


def run_script(folder, num_rounds, *flags):
    command = [sys.executable, *flags, "-c", SCRIPT, str(folder), str(num_rounds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_ends_with_requests_in_flight_and_without_a_word(tmp_path):
    """Under `-X dev`, which reports what was not closed."""
    process = run_script(tmp_path, 1, "-X", "dev", "-W", "error")
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out, said) == (0, "ready\n", "")


# -- a disk that fails or is slow ----------------------------------------------------------------------------

ONE = DiskOptions(block_bytes=8192, queue_depth=1)  # calls in the order of the blocks
SIZE = 40_960  # five blocks


class Item(Evictable):
    memory_bytes = 1

    def __init__(self, writes: set[Item]) -> None:
        self._writes = writes

    def evict(self) -> Item:
        self._writes.add(self)
        return self

    def wait(self) -> None:
        self._writes.remove(self)


def test_few_evicted_masters_are_written_at_once():
    cache, writes = LruCache(), set()
    for _ in range(8):
        cache.touch(Item(writes))
        assert len(writes) <= WRITES_IN_FLIGHT


def test_masters_that_are_held_twice_stay_until_the_outer_hold_ends():
    cache, writes = LruCache(), set()
    with cache.hold():
        for _ in range(4):
            cache.touch(Item(writes))
        with cache.hold():
            cache.touch(Item(writes))
        assert cache.memory_bytes == 5 and not writes
    assert cache.memory_bytes == 0


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("fails_at", [0, 4])
def test_an_io_error_names_the_operation_the_place_and_the_remedy(tmp_path, operation, fails_at):
    disk, (_, extent) = file_of(tmp_path, 4096, SIZE, options=ONE)
    broken = BrokenDisk(tmp_path, fails_at, "eio", READ_CALLS)
    with broken.in_place():
        pending = getattr(disk, operation)(extent, pages(SIZE, 1))
        said = re.escape(
            f"cannot {operation} 8192 bytes at byte {4096 + 8192 * fails_at} of the file of rank 0 "
            f"in {tmp_path}: EIO, Input/output error; the disk is failing: look at the kernel log "
            "(dmesg), or set nvme_path"
        )
        for _ in range(2):  # each time
            with pytest.raises(XdsError, match=f"^{said}"):
                pending.wait()
        assert pending.is_done()
    assert broken.count == fails_at + 1  # the other blocks are left out
    copy = pages(SIZE)
    disk.write(extent, pages(SIZE, 2))  # other requests are served
    disk.read(extent, copy).wait()
    assert torch.equal(copy, pages(SIZE, 2))
    disk.close()


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("block_bytes", [8192, 12_288])  # half of it is a page, or is not
def test_a_partial_transfer_is_continued(tmp_path, operation, block_bytes):
    options = DiskOptions(block_bytes, queue_depth=1)
    disk, (extent,) = file_of(tmp_path, 5 * block_bytes, options=options)
    source, copy = pages(5 * block_bytes, 1), pages(5 * block_bytes)
    broken = BrokenDisk(tmp_path, 4, "short", READ_CALLS)
    if operation == "write":
        with broken.in_place():
            disk.write(extent, source).wait()
        disk.read(extent, copy).wait()
    else:
        disk.write(extent, source).wait()
        with broken.in_place():
            disk.read(extent, copy).wait()
    assert torch.equal(source, copy)
    assert broken.count == 6 and broken.hit.startswith("p")
    disk.close()


def test_a_full_disk_says_what_to_do(tmp_path):
    """The space is reserved; some file systems cannot, and others write elsewhere."""
    disk, (extent,) = file_of(tmp_path, SIZE, options=ONE)
    with BrokenDisk(tmp_path, 2, "full", READ_CALLS).in_place():
        pending = disk.write(extent, pages(SIZE, 1))
        with pytest.raises(XdsError, match=r"ENOSPC, No space left.*free space there.*more ranks"):
            pending.wait()
        disk.read(extent, pages(SIZE)).wait()
    disk.close()


def test_a_disk_that_transfers_nothing_more_is_an_error(tmp_path, monkeypatch):
    disk, (extent,) = file_of(tmp_path, SIZE)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(XdsError, match=r"cannot read .*the file has ended"):
        disk.read(extent, pages(SIZE)).wait()
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(XdsError, match="no more bytes"):
        disk.write(extent, pages(SIZE)).wait()
    disk.close()


def test_a_mistake_in_a_thread_is_raised_by_the_ticket(tmp_path, monkeypatch):
    disk, (extent,) = file_of(tmp_path, SIZE)
    monkeypatch.setattr(os, "preadv", lambda *_: None)
    with pytest.raises(XdsError, match="internal error: a read of the file of rank 0.*TypeError"):
        disk.read(extent, pages(SIZE)).wait()
    disk.close()


def test_a_read_behind_a_failed_write_fails_too(tmp_path):
    """It would return old bytes. A later write works."""
    disk, (extent, other) = file_of(tmp_path, SIZE, 4096, options=ONE)
    with BrokenDisk(tmp_path, 0, "eio").in_place():
        write = disk.write(extent, pages(SIZE, 1))
        read, beside = disk.read(extent, pages(SIZE)), disk.read(other, pages(4096))
        again = disk.write(extent, pages(SIZE, 2))
        for pending in (write, read):
            with pytest.raises(XdsError, match="cannot write 8192 bytes at byte 0"):
                pending.wait()
        beside.wait()
        again.wait()
    disk.close()


def test_a_slow_disk_is_reported_once_while_a_caller_waits(tmp_path, gate, caplog):
    def warnings_of(caplog):
        return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]

    disk, (extent,) = file_of(tmp_path, SIZE, options=DiskOptions(8192, 2, slow_seconds=0.05))
    pending = disk.write(extent, pages(SIZE, 1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pending.wait)
        while not warnings_of(caplog):
            time.sleep(0.01)
        assert not pending.is_done()
        gate.set()
        waiting.result()
    (said,) = warnings_of(caplog)
    place = rf"a write at byte \d+ of the file of rank 0 in {tmp_path}"
    assert re.search(rf"{place} has taken [\d.]+ s so far", said)
    disk.close()


# -- its creation -------------------------------------------------------------------------------------------

FILE_BYTES = 1 << 20


def refuse(code):
    def call(*_, **__):
        raise OSError(code, os.strerror(code))

    return call


def comes_back(folder) -> bool:
    """Whether a file there works."""
    disk, (_, extent) = file_of(folder, 4096, 30_000)
    source, copy = pages(30_000, 1), pages(30_000)
    disk.write(extent, source)
    disk.read(extent, copy).wait()
    disk.close()
    return torch.equal(source, copy)


def test_a_file_has_no_name_and_its_space_is_reserved(tmp_path):
    new = create_file(tmp_path / "not" / "there", FILE_BYTES, rank=0)
    state = os.fstat(new.fd)
    assert state.st_size == FILE_BYTES and state.st_blocks * 512 >= FILE_BYTES
    assert state.st_nlink == 0 and not list((tmp_path / "not" / "there").iterdir())
    assert not os.get_inheritable(new.fd)
    assert state.st_mode & 0o077 == 0  # states of a model are nobody else's business
    os.close(new.fd)


def test_a_file_system_without_nameless_files(tmp_path, monkeypatch):
    plain, names, code = os.open, [], errno.EOPNOTSUPP

    def opened(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        names.append(path)
        return plain(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    assert comes_back(tmp_path)
    assert len(names) == 1 and names[0].name.startswith(f".xds-rank0-{os.getpid()}-")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["fcntl", "preadv"])
def test_refused_direct_io_falls_back_to_the_page_cache(tmp_path, monkeypatch, where):
    if where == "fcntl":
        plain = fcntl.fcntl

        def call(fd, command, value=0):
            if command == fcntl.F_SETFL and value & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return plain(fd, command, value)

        monkeypatch.setattr(fcntl, "fcntl", call)
    else:
        plain = getattr(os, where)

        def call(fd, buffers, offset):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return plain(fd, buffers, offset)

        monkeypatch.setattr(os, where, call)
    disk = DiskFile(tmp_path, FILE_BYTES, SMALL, rank=0)
    assert not disk.is_direct
    disk.close()
    assert comes_back(tmp_path)


def test_space_that_cannot_be_reserved_is_only_checked(tmp_path, monkeypatch):
    for code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF):
        monkeypatch.setattr(os, "posix_fallocate", refuse(code))
        assert comes_back(tmp_path)


def test_reserving_never_writes_to_every_block(tmp_path, monkeypatch):
    """glibc does that where the file system cannot reserve, unless the file is for appending."""
    seen, plain = [], os.posix_fallocate

    def call(fd, offset, size):
        seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND))
        plain(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", call)
    assert comes_back(tmp_path) and seen == [True]


def space(monkeypatch, free_bytes, blocks=10**9):
    answer = SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096, f_blocks=blocks)
    monkeypatch.setattr(os, "fstatvfs", lambda _: answer)


def test_too_little_space_names_the_setting_both_sizes_and_the_remedy(tmp_path, monkeypatch):
    space(monkeypatch, 4096 * 500)
    before = open_files()
    said = re.escape(
        f"nvme_path = {tmp_path}: rank 7 needs 3.00 GB (3000000512 bytes) there, and 2.05 MB "
        "(2048000 bytes) are free; free space there, set nvme_path to a folder on another disk, "
        "or use more ranks"
    )
    with pytest.raises(UsageError, match=f"^{said}$"):
        DiskFile(tmp_path, 3_000_000_512, SMALL, rank=7)
    assert open_files() == before and not list(tmp_path.iterdir())


def test_space_that_others_take_meanwhile_is_the_same_error(tmp_path, monkeypatch):
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        monkeypatch.setattr(os, "posix_fallocate", refuse(code))
        with pytest.raises(UsageError, match=r"rank 1 needs 1.05 MB .* are free; free space"):
            create_file(tmp_path, FILE_BYTES, rank=1)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UsageError, match=r"nvme_path = .*taken: rank 2 .*EEXIST.*to a folder"):
        create_file(tmp_path / "taken", FILE_BYTES, rank=2)
    with pytest.raises(UsageError, match=r"nvme_path = .*ENOTDIR.*to a folder"):
        create_file(tmp_path / "taken" / "below", FILE_BYTES, rank=2)


@pytest.mark.parametrize("kind", ["eio", "full"])
def test_a_disk_that_fails_at_any_call_of_the_creation(tmp_path, kind):
    """One error that names the setting, and no open file; or a file that works."""
    before, folder, reasons = open_files(), tmp_path / "made", []
    for fails_at in range(20):
        disk = BrokenDisk(tmp_path, fails_at, kind, (*SPACE_CALLS, "preadv"))
        with disk.in_place():
            try:
                os.close(create_file(folder, FILE_BYTES, rank=4).fd)
            except UsageError as error:
                reasons.append(disk.hit.split()[0])
                assert f"nvme_path = {folder}: rank 4" in str(error), disk.hit
        assert open_files() == before, disk.hit
        assert not list(folder.iterdir()) if folder.exists() else True
        if disk.count <= fails_at:
            break
    assert reasons[:4] == ["mkdir", "open", "posix_fallocate", "pwritev"]
    assert disk.count <= fails_at
