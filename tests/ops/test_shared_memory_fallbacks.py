"""Tests of ranks that cannot share memory: they send messages, sums are right, one line of one log says why."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks

from xds.ops.comm.collectives import PartOf
from xds.ops.comm.memory import segment
from xds.ops.comm.memory.operations import InMemory
from xds.ops.comm.opening import open_collectives
from xds.ops.comm.shared_memory import SharedMemory
from xds.utils.errors import BuildError, PeerError

CPU = torch.device("cpu")
MESSAGES = "PeerToPeer"


class Lines(logging.Handler):
    """What this rank logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("xds").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def opened(arrange: Callable[[int], None]) -> tuple[str, list[str], bool]:
    """The kind of collectives after `arrange(rank)`, what is logged, and whether a sum is right.

    The group is opened twice, the second time as a part of itself.
    """
    group, lines = dist.group.WORLD, Lines()
    assert group is not None
    arrange(group.rank())
    first = open_collectives(group, CPU)
    part = open_collectives(group, CPU, PartOf(first, (0, 1)))
    flat, out = torch.ones(80_000), torch.zeros(40_000)
    for one in (first, part):
        one.reduce_scatter(flat, out, add=True, buffer=1, kind="sum").wait()
    return type(first).__name__, lines.texts, bool((out == 2 * group.size()).all())


def _refused(*_: Any) -> Any:
    raise OSError(38, "Function not implemented")


def has_no_memfd(rank: int) -> None:
    os.memfd_create = _refused  # type: ignore[assignment]
    segment._free_bytes = lambda: 64 << 20


def has_no_library_on_one(rank: int) -> None:
    if rank == 1:
        segment.Native = _no_library  # type: ignore[misc]


def _no_library() -> Any:
    raise BuildError("no compiler", remedy="none")


def has_a_container_of_its_own_on_one(rank: int) -> None:
    if rank == 1:
        own, process = segment.segment(), os.getpid()
        segment._opened[1] = own
        assert process != 1
        os.getpid = lambda: 1


@pytest.mark.parametrize(
    ("arrange", "teller", "said"),
    [
        (has_no_memfd, 0, "has 64 MiB free of the .*--shm-size"),
        (has_no_library_on_one, 1, "on rank 1: its native library is missing: no compiler"),
        (has_a_container_of_its_own_on_one, 0, "rank 1 is on this machine, but .*process 1"),
    ],
)
def test_ranks_send_messages_and_one_says_why(
    arrange: Callable[[int], None], teller: int, said: str
) -> None:
    found = run_new_ranks(opened, 2, arrange)
    assert [(kind, is_right) for kind, _, is_right in found] == [(MESSAGES, True)] * 2
    lines = [texts for _, texts, _ in found]
    assert [len(texts) for texts in lines] == [int(rank == teller) for rank in range(2)]
    assert re.search(said, lines[teller][0])


def maps_left() -> tuple[str, int]:
    """Rank 1 cannot map rank 0, which has mapped rank 1 then. Returns how many segments are mapped."""
    group = dist.group.WORLD
    assert group is not None
    native = segment.segment().native
    if group.rank() == 1:
        native.map = lambda *_: None
    kind = type(open_collectives(group, CPU)).__name__
    with open("/proc/self/maps") as file:
        files = {line.split()[4] for line in file if "memfd:xds" in line}
    return kind, len(files)


def test_what_was_mapped_is_returned() -> None:
    assert run_new_ranks(maps_left, 2) == [(MESSAGES, 1)] * 2


def without_names_of_calls(rank: int) -> None:
    del os.pidfd_open
    if rank == 1 and segment._free_bytes() > segment.LEAST_SHARE * segment._memory_bytes():
        os.memfd_create = _refused  # type: ignore[assignment]


def ended(heard: Path) -> None:
    """What rank 0 hears of rank 1, which is killed."""
    group = dist.group.WORLD
    assert group is not None
    without_names_of_calls(group.rank())
    found = open_collectives(group, CPU)
    assert isinstance(found, SharedMemory)
    found.barrier()
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _, handle = found.start_gather_small(torch.ones(1))
    assert isinstance(handle, InMemory)
    heard.write_text(str(handle.settle()))


def test_an_older_python_hears_of_ends_and_leaves_no_file(tmp_path: Path) -> None:
    before = set(os.listdir(segment.SHM_FOLDER))
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_new_ranks(ended, 2, tmp_path / "heard", timeout_seconds=20)
    assert "rank 1: its process ended" in (tmp_path / "heard").read_text()
    assert {name for name in os.listdir(segment.SHM_FOLDER) if "xds-" in name} <= before


def fill_up(folder: str) -> list[str]:
    """What becomes of messages of 16 MB when the folder of this rank's segment is full."""
    os.memfd_create = _refused  # type: ignore[assignment]
    segment.SHM_FOLDER = folder
    segment._memory_bytes = lambda: 256 << 20
    group = dist.group.WORLD
    assert group is not None
    found, told = open_collectives(group, CPU), []
    assert isinstance(found, SharedMemory)

    def send(flat: torch.Tensor) -> None:
        out = torch.zeros(flat.numel() // 2)
        try:
            found.reduce_scatter(flat, out, add=False, buffer=1, kind="sum").wait()
            told.append("right" if bool((out == 2).all()) else "wrong")
        except PeerError as error:
            told.append(str(error))

    shared = found.empty(4_000_000, torch.float32)
    send(shared.fill_(1.0))
    if group.rank() == 0:
        with Path(folder, "other").open("wb") as file, suppress(OSError):
            while file.write(bytes(1 << 20)):
                file.flush()
    dist.barrier()
    send(shared.fill_(1.0))  # is there already
    send(
        found.empty(4_000_000, torch.float32).fill_(1.0)
    )  # of this rank's own memory, so it is copied
    return told


@pytest.mark.slow
def test_a_folder_that_fills_later_is_named(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m", "none", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        found = run_new_ranks(fill_up, 2, str(tmp_path), timeout_seconds=20)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    for first, second, third in found:
        assert first == second == "right"
        assert f"{tmp_path} is full; free a part of it" in third


def forked() -> tuple[bool, bool]:
    """A child that ends in the middle of training does not free, and does not end, what its parent uses."""
    group = dist.group.WORLD
    assert group is not None
    found = open_collectives(group, CPU)
    flat = found.empty(200_000, torch.float32).fill_(1.0)
    child = os.fork()
    if child == 0:
        del flat
        os._exit(0)
    _, status = os.waitpid(child, 0)
    other = found.empty(200_000, torch.float32)
    out = torch.zeros(100_000)
    found.reduce_scatter(flat, out, add=False, buffer=1, kind="sum").wait()
    return status == 0 and other.data_ptr() != flat.data_ptr(), bool((out == 2).all())


def test_a_forked_child_frees_nothing() -> None:
    assert run_new_ranks(forked, 2) == [(True, True)] * 2
