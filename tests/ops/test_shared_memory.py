"""Ranks in shared memory that are killed, stopped or forked; and those that must send messages instead."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks, run_processes

from xds.ops.comm.collectives import Collectives, PartOf
from xds.ops.comm.memory import segment
from xds.ops.comm.memory.operations import InMemory
from xds.ops.comm.memory.shared_memory import SharedMemoryBackend
from xds.ops.comm.opening import open_collectives
from xds.ops.watch import reports
from xds.utils.errors import BuildError, PeerError, UsageError

CPU = torch.device("cpu")
LARGE = 40_000  # elements: peers read them where they are
MAX_ENTRIES = 1024  # as in segment.h


def opened(timeout_seconds: float = 60.0) -> Collectives:
    found = open_collectives(dist.group.WORLD, CPU)
    assert isinstance(found.backend, SharedMemoryBackend)
    found.backend.memory._timeout_seconds = timeout_seconds
    return found


def failure(do: Callable[[], Any]) -> str:
    """The message of the PeerError, long before the group's timeout. In new ranks only."""
    reports.PATIENCE_SECONDS = 0.1  # for reports of others
    with pytest.raises(PeerError) as caught:
        do()
    return str(caught.value)


def start_sum(shared: Collectives, flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
    out = torch.zeros(LARGE)
    return out, shared.reduce_scatter(flat, out, add=False, buffer=0, kind="sum")


def near(shared: Collectives, value: float) -> torch.Tensor:
    return shared.empty(LARGE * shared.world_size, torch.float32).fill_(value)


def sum_of(shared: Collectives) -> torch.Tensor:
    out, handle = start_sum(shared, near(shared, 1.0))
    handle.wait()
    return out


def pids(shared: Collectives) -> list[int]:
    return [int(pid) for pid in shared.gather_small(torch.tensor([os.getpid()])).flatten()]


# -- ranks that cannot share memory -------------------------------------------------------------------------

MESSAGES = "GlooBackend"


class Lines(logging.Handler):
    """What this rank logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("xds").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def sums_after(arrange: Callable[[int], None]) -> tuple[str, list[str], bool]:
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
    return type(first.backend).__name__, lines.texts, bool((out == 2 * group.size()).all())


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
    found = run_new_ranks(sums_after, 2, arrange)
    assert [(kind, is_right) for kind, _, is_right in found] == [(MESSAGES, True)] * 2
    lines = [texts for _, texts, _ in found]
    assert [len(texts) for texts in lines] == [int(rank == teller) for rank in range(2)]
    assert re.search(said, lines[teller][0])


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
    assert isinstance(found.backend, SharedMemoryBackend)
    found.barrier()
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _, handle = found.backend.start_gather_small(torch.ones(1), 0)
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
    assert isinstance(found.backend, SharedMemoryBackend)

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


# -- killed and stopped -------------------------------------------------------------------------------------


def losing(folder: str) -> None:
    shared = opened()
    process = pids(shared)[1]
    if shared.rank == 1:
        signal.pause()
    if shared.rank == 0:
        threading.Timer(0.2, os.kill, (process, signal.SIGKILL)).start()
    text = failure(lambda: sum_of(shared))
    failure(lambda: sum_of(shared))
    Path(folder, str(shared.rank)).write_text(text)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 died with exit code -9"):
        run_new_ranks(losing, 3, str(tmp_path))
    for rank in (0, 2):
        text = (tmp_path / str(rank)).read_text()
        assert "rank 1 did not report: it closed its connection" in text


def stopping() -> str:
    shared = opened(timeout_seconds=0.5 if dist.get_rank() == 0 else 60)
    process = pids(shared)[1]
    if shared.rank == 1:
        os.kill(process, signal.SIGSTOP)
        far = torch.ones(LARGE * 2)  # it is copied, so this rank would not wait for its reader
        return failure(lambda: start_sum(shared, far)[1].wait())
    flat = near(shared, 1.0)
    found = failure(lambda: start_sum(shared, flat)[1].wait())
    flat.fill_(77.0)  # the memory is the caller's again
    os.kill(process, signal.SIGCONT)
    return found


def test_a_stopped_rank_is_named_and_reads_nothing_that_was_given_up() -> None:
    text, other = run_new_ranks(stopping, 2)
    assert "Timed out after 0 s of waiting for rank 1" in text
    assert "rank 0, which stopped waiting" in other


def naming() -> str:
    shared = opened(timeout_seconds=0.5)
    processes = pids(shared)
    if shared.rank == 2:
        os.kill(processes[2], signal.SIGSTOP)
    text = failure(lambda: sum_of(shared))
    if shared.rank == 0:
        os.kill(processes[2], signal.SIGCONT)
    return text


def test_a_sum_names_the_rank_that_is_missing_and_not_the_first_one() -> None:
    texts = run_new_ranks(naming, 3)[:2]  # one times out first, and the other sees that
    assert any("Timed out after 0 s of waiting for rank 2" in text for text in texts)


# -- messages -----------------------------------------------------------------------------------------------


def flooding() -> bool:
    shared, count = opened(), MAX_ENTRIES + 300
    if shared.rank == 0:
        for value in range(count):
            one = torch.full((3,), float(value))
            shared.send(one, 1, what="a message", kind="p").wait()
        return True
    time.sleep(0.2)
    good = True
    for value in range(count):
        came = torch.zeros(3)
        shared.receive(came, 0, what="a message").wait()
        good = good and came.tolist() == [float(value)] * 3
    return good


def test_more_messages_than_entries_arrive_in_order() -> None:
    assert run_processes(flooding, 2) == [True, True]


def ignored() -> str:
    shared = opened(timeout_seconds=0.3)

    def flood() -> None:
        for _ in range(MAX_ENTRIES + 1):
            shared.send(torch.zeros(1), 1, what="a message", kind="p").wait()

    text = failure(flood) if shared.rank == 0 else ""
    dist.barrier()
    return text


def test_a_rank_that_reads_no_messages_is_named() -> None:
    assert "rank 1 reads no messages" in run_new_ranks(ignored, 2)[0]


def dropping() -> tuple[list[float], int]:
    shared = opened()
    found = []
    for _ in range(3):
        out, handle = start_sum(shared, near(shared, 2.0))
        if shared.rank == 1:
            handle.wait()
            found += out[:1].tolist()
        del out, handle
        gc.collect()
    shared.barrier()
    time.sleep(0.01)
    shared.barrier()
    return found, len(segment.segment().dropped)


def test_a_dropped_handle_holds_up_nobody_and_leaves_nothing() -> None:
    assert run_processes(dropping, 2) == [([], 0), ([4.0] * 3, 0)]


def in_threads() -> list[bool]:
    shared, good = opened(), [True] * 4

    def run(thread: int) -> None:
        for turn in range(9):
            numel = 1 + 9000 * (turn % 3)
            flat = shared.empty(numel * shared.world_size, torch.float32)
            shard = torch.full((numel,), float(shared.rank + thread + turn))
            shared.all_gather(flat, shard, buffer=10 + thread, kind="gather").wait()
            wants = [float(rank + thread + turn) for rank in range(shared.world_size)]
            good[thread] &= flat.view(-1, numel).unique(dim=1).flatten().tolist() == wants

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return good


def test_threads_may_call_at_once() -> None:
    assert run_processes(in_threads, 2) == [[True] * 4] * 2


# -- forks, signals, leftovers ------------------------------------------------------------------------------


def forking() -> tuple[int, float]:
    shared = opened()
    own = near(shared, 3.0)
    out, handle = start_sum(shared, own)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (handle.wait, shared.barrier):
                with pytest.raises(UsageError, match="was forked from a rank"):
                    call()
            del handle, shared, own
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert near(shared, 0.0).data_ptr() != own.data_ptr()  # the child has freed nothing
    handle.wait()
    shared.barrier()
    return status, float(out[-1])


def test_a_forked_child_takes_no_part_and_disturbs_nobody() -> None:
    assert run_processes(forking, 2) == [(0, 6.0)] * 2


class Interrupt(Exception):
    pass


def interrupting() -> float:
    shared = opened()

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    if shared.rank == 0:
        out, handle = start_sum(shared, near(shared, 3.0))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupt):
            handle.wait()
    else:
        time.sleep(0.3)
        out, handle = start_sum(shared, near(shared, 4.0))
    handle.wait()
    signal.signal(signal.SIGALRM, before)
    return float(out[0])


def test_an_interrupted_wait_can_be_taken_up_again() -> None:
    assert run_processes(interrupting, 2) == [7.0, 7.0]


def leftovers() -> list[tuple[int, int]]:
    """Mapped segments and descriptors after each of several rows of groups, with messages that nobody reads."""
    found = []
    for _ in range(3):
        for _ in range(5):
            shared = opened()
            shared.send(torch.ones(2), 1 - shared.rank, what="lost", kind="p").wait()
            shared.barrier()
            del shared
        shared = opened()
        shared.barrier()
        maps = Path("/proc/self/maps").read_text().splitlines()
        segments = sum("memfd:xds" in line for line in maps)
        found.append((segments, len(os.listdir("/proc/self/fd"))))
    return found


def test_groups_one_after_the_other_leave_nothing() -> None:
    for rows in run_new_ranks(leftovers, 2):
        assert len(set(rows)) == 1 and rows[0][0] <= 4, rows


def outliving() -> bool:
    """Handles in flight are collected after their group."""
    shared, later = opened(), opened()
    out, handle = start_sum(shared, near(shared, 1.0)) if shared.rank == 0 else (None, None)
    later.barrier()
    del shared
    gc.collect()
    filler = [bytearray(400) for _ in range(1000)]  # takes the group's memory, if that was freed
    del handle
    gc.collect()
    for _ in range(5):
        again = opened()
        again.barrier()
        del again
        gc.collect()
    return len(filler) == 1000 and bool((sum_of(later) == 2.0).all())


def test_a_handle_may_be_collected_after_its_group() -> None:
    assert run_new_ranks(outliving, 2) == [True, True]
