"""A disk that fails, transfers half, ends early or is slow: which ticket says what."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from broken_disk import READ_CALLS, BrokenDisk
from test_disk_file import disk_threads, file_of, open_files, pages
from time_limit import limit_time  # noqa: F401

from xds.offload.disk import workers
from xds.offload.disk.options import DiskOptions
from xds.utils.errors import XdsError

ONE = DiskOptions(block_bytes=8192, queue_depth=1)  # calls in the order of the blocks
SIZE = 40_960  # five blocks


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("fails_at", [0, 4])
def test_an_io_error_names_the_operation_the_place_and_the_remedy(tmp_path, operation, fails_at):
    disk, (_, extent) = file_of(tmp_path, 4096, SIZE, options=ONE)
    broken = BrokenDisk(tmp_path, fails_at, "eio", READ_CALLS)
    with broken.in_place():
        ticket = getattr(disk, operation)(extent, pages(SIZE, 1))
        said = re.escape(
            f"cannot {operation} 8192 bytes at byte {4096 + 8192 * fails_at} of the file of rank 0 "
            f"in {tmp_path}: EIO, Input/output error; the disk is failing: look at the kernel log "
            "(dmesg), or set nvme_path"
        )
        for _ in range(2):  # each time
            with pytest.raises(XdsError, match=f"^{said}"):
                ticket.wait()
        assert ticket.is_done()
    assert broken.count == fails_at + 1  # the other blocks are left out
    copy = pages(SIZE)
    disk.write(extent, pages(SIZE, 2))  # other requests are served
    disk.read(extent, copy).wait()
    assert torch.equal(copy, pages(SIZE, 2))
    disk.close()


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("fails_at", [0, 4])
@pytest.mark.parametrize("block_bytes", [8192, 12_288])  # half of it is a page, or is not
def test_a_partial_transfer_is_continued(tmp_path, operation, fails_at, block_bytes):
    options = DiskOptions(block_bytes, queue_depth=1)
    disk, (extent,) = file_of(tmp_path, 5 * block_bytes, options=options)
    source, copy = pages(5 * block_bytes, 1), pages(5 * block_bytes)
    broken = BrokenDisk(tmp_path, fails_at, "short", READ_CALLS)
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
        ticket = disk.write(extent, pages(SIZE, 1))
        with pytest.raises(XdsError, match=r"ENOSPC, No space left.*free space there.*more ranks"):
            ticket.wait()
        disk.read(extent, pages(SIZE)).wait()
    disk.close()


@pytest.mark.parametrize("operation, what", [("preadv", "has ended"), ("pwritev", "no more bytes")])
def test_a_disk_that_transfers_nothing_more_is_an_error(tmp_path, monkeypatch, operation, what):
    disk, (extent,) = file_of(tmp_path, SIZE)
    monkeypatch.setattr(os, operation, lambda *_: 0)
    request = disk.read if operation == "preadv" else disk.write
    with pytest.raises(XdsError, match=what):
        request(extent, pages(SIZE)).wait()
    disk.close()


def test_a_file_that_was_cut_is_an_error(tmp_path):
    disk, (extent,) = file_of(tmp_path, SIZE)
    os.ftruncate(disk._workers._fd, 10_000)
    with pytest.raises(XdsError, match=r"cannot read .*the file has ended"):
        disk.read(extent, pages(SIZE)).wait()
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
        for ticket in (write, read):
            with pytest.raises(XdsError, match="cannot write 8192 bytes at byte 0"):
                ticket.wait()
        beside.wait()
        again.wait()
    disk.close()


def test_close_after_failures_leaves_nothing(tmp_path):
    disk, (extent,) = file_of(tmp_path, SIZE)
    with BrokenDisk(tmp_path, 1, "full").in_place():
        for seed in range(5):
            disk.write(extent, pages(SIZE, seed))
            disk.read(extent, pages(SIZE))
        disk.close()
    assert not disk_threads()
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]


# -- slow disks -----------------------------------------------------------------------------------------


def slow_down(monkeypatch, wait):
    """Before each block `wait` is called."""
    transfer = workers._transfer

    def late(*args):
        wait()
        transfer(*args)

    monkeypatch.setattr(workers, "_transfer", late)


def warnings_of(caplog):
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def test_a_slow_disk_is_reported_once_while_a_caller_waits(tmp_path, monkeypatch, caplog):
    is_over = threading.Event()
    slow_down(monkeypatch, lambda: is_over.wait(10))
    disk, (extent,) = file_of(tmp_path, SIZE, options=DiskOptions(8192, 2, slow_seconds=0.05))
    ticket = disk.write(extent, pages(SIZE, 1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ticket.wait)
        while not warnings_of(caplog):
            time.sleep(0.01)
        assert not ticket.is_done()
        is_over.set()
        waiting.result()
    (said,) = warnings_of(caplog)
    place = rf"a write at byte \d+ of the file of rank 0 in {tmp_path}"
    assert re.search(rf"{place} has taken [\d.]+ s so far", said)
    disk.close()


def test_a_long_queue_on_a_quick_disk_is_not_slow(tmp_path, monkeypatch, caplog):
    slow_down(monkeypatch, lambda: time.sleep(0.05))
    disk, (extent,) = file_of(tmp_path, SIZE * 4, options=DiskOptions(8192, 1, slow_seconds=0.7))
    disk.write(extent, pages(SIZE * 4, 1)).wait()  # a second
    assert not warnings_of(caplog)
    disk.close()
