"""Host memory: its size, when it is registered and freed; memory that is used again; a pool of slots."""

from __future__ import annotations

import gc
import mmap
import os
import re
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from time_limit import limit_time  # noqa: F401

from xds.offload import pinned
from xds.offload.host_pool import HostPool
from xds.offload.pinned import PageableWarning, host_memory
from xds.offload.slot_pool import SlotPool
from xds.ops.device import KINDS, Accelerator, present
from xds.utils.errors import UsageError, XdsError


class Cudart:
    """A stand-in for torch's CUDA runtime. Registered memory must be unregistered, while it is mapped."""

    def __init__(self, mappings: list[weakref.ref[mmap.mmap]]) -> None:
        self.mappings = mappings
        self.was_mapped: list[bool] = []
        self.code = 0
        self.current = 0  # in a thread that has not set it
        self.registered: dict[int, int] = {}
        self.asked: list[int] = []
        self.events: list[str] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.asked.append(num_bytes)
        if self.code == 0:
            self.registered[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.was_mapped.append(all(one() is not None for one in self.mappings))
        self.record("unregister")
        del self.registered[address]
        return 0

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        """Like torch.cuda.device."""
        self.current = index
        yield
        self.current = 0

    def record(self, event: str) -> None:
        self.events.append(f"{event} {self.current}")

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return f"error {code}"


@pytest.fixture
def mappings(monkeypatch):
    """A weak reference to each mapping; a dead one is unmapped."""
    made, mapped = [], pinned._mapped

    def remember(num_bytes: int) -> mmap.mmap:
        mapping = mapped(num_bytes)
        made.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(pinned, "_mapped", remember)
    return made


@pytest.fixture
def cudart(monkeypatch, mappings):
    runtime = Cudart(mappings)
    card = Accelerator(torch.device("cuda", 3), KINDS["cuda"])
    monkeypatch.setattr(pinned, "present", lambda: card)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", runtime.device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.record("synchronize"))
    pinned._failures.cache_clear()
    return runtime


@pytest.mark.parametrize("pin", [False, True])
def test_memory_has_the_exact_size_is_zeroed_and_aligned_to_a_page(pin, cudart):
    sizes = (1, 4095, 4096, 4097, 3_000_001)
    for num_bytes in sizes:
        memory = host_memory(num_bytes, pin=pin)
        assert memory.shape == (num_bytes,) and memory.dtype == torch.uint8
        assert memory.data_ptr() % 4096 == 0
        assert memory.untyped_storage().nbytes() == num_bytes
        assert not memory.any()
        memory.fill_(7)
    assert cudart.asked == (list(sizes) if pin else [])


def test_memory_is_unregistered_and_then_unmapped_with_the_last_tensor(cudart, mappings):
    memory = host_memory(10_000, pin=True)
    address = memory.data_ptr()
    part = memory[4096:8192].view(torch.float32)
    del memory
    gc.collect()
    part.fill_(2.0)
    assert cudart.registered == {address: 10_000} and not cudart.events
    storage = part.untyped_storage()
    del part
    assert cudart.registered
    del storage
    assert not cudart.registered and cudart.events == ["synchronize 3", "unregister 3"]
    assert cudart.was_mapped == [True] and mappings[0]() is None


def test_memory_is_unregistered_where_the_device_has_failed(cudart, monkeypatch):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    memory = host_memory(4096, pin=True)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    del memory
    assert cudart.events == ["unregister 3"]


@pytest.mark.parametrize(
    "limit_bytes, limit, remedy",
    [(8 << 20, "8192 KiB", "ulimit -l unlimited"), (-1, "unlimited", "free memory of the host")],
)
def test_a_failed_registration_warns_once_and_gives_pageable_memory(
    cudart, monkeypatch, limit_bytes, limit, remedy
):
    monkeypatch.setattr(pinned.resource, "getrlimit", lambda _: (limit_bytes, limit_bytes))
    cudart.code = 2
    with pytest.warns(PageableWarning) as said:
        memory = host_memory(3_000_000_000, pin=True)
        others = [host_memory(5000 + more, pin=True) for more in range(3)]
    (text,) = [str(one.message) for one in said]
    assert re.search(rf"3\.00 GB .*error 2.*ulimit -l, is {limit}\).*pin_memory", text)
    assert remedy in text and "\n" not in text
    memory[-1] = 3
    del memory, others
    assert not cudart.events  # what was not registered is not unregistered


def test_a_failed_registration_leaves_no_error_for_the_next_kernel(cudart, monkeypatch):
    launches = []
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *_, device: launches.append(device) or ones(1))
    cudart.code = 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PageableWarning)
        host_memory(4096, pin=True)
    assert launches == ["cuda"]


def test_too_much_memory_is_refused_with_a_remedy():
    with pytest.raises(UsageError, match=r"cannot allocate 9007.20 TB of host memory.*more hosts"):
        host_memory(1 << 53, pin=False)


def test_a_forked_process_neither_unregisters_nor_unmaps(cudart, mappings):
    memory = host_memory(1 << 20, pin=True)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads, Python 3.12
        pid = os.fork()
    if pid == 0:
        address = f"{memory.data_ptr():x}-"
        has_memory = address in Path("/proc/self/maps").read_text()
        del memory
        os.write(write, f"{has_memory} {mappings[0]() is not None} {cudart.events}".encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(read, 100) == b"False True []"
    os.close(read), os.close(write)
    memory.fill_(1)
    assert cudart.registered


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_copies_from_and_to_pinned_memory_and_a_failure_leaves_it_usable():
    memory = host_memory(3_000_001, pin=True)
    assert memory.is_pinned() and memory[4096:].is_pinned()
    memory.random_(0, 256)
    there = memory.to("cuda", non_blocking=True)
    back = host_memory(3_000_001, pin=True)
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, memory)
    pinned._failures.cache_clear()
    with pytest.warns(PageableWarning, match="cannot pin 3.00 MB"):  # it is registered already
        assert not pinned._is_registered(present(), memory.data_ptr(), 3_000_001)
    assert torch.arange(10, device="cuda").sum().item() == 45


def test_memory_that_is_used_again_grows_in_few_steps() -> None:
    """Inputs that get longer in every step do not lock new memory in every step."""
    pool, addresses = HostPool(pin=False), set()
    for num_bytes in range(1000, 20_000, 100):
        block = pool.take(num_bytes)
        assert block.memory.numel() >= num_bytes
        addresses.add(id(block))
        kept = block  # its number stays its own until the next one
        pool.give(kept)
    assert len(addresses) <= 9
    first, second = pool.take(10), pool.take(20_000)  # the only block is in use
    assert first is kept and second.memory.numel() == 20_000
    pool.give(first)
    pool.give(second)
    assert pool.take(20_000) is second


# -- a pool of slots ----------------------------------------------------------------------------------------

SECONDS = 10  # for what could hang


def test_a_given_slot_is_taken_again():
    pool = SlotPool(4096, 2, pin=False)
    first, second = pool.take(), pool.take()
    pool.give(second)
    assert pool.take().data_ptr() == second.data_ptr()
    pool.give(first[:100])  # a part from its beginning names the slot as well
    assert pool.take().data_ptr() == first.data_ptr()


def test_a_thread_that_holds_all_slots_is_told_so():
    pool = SlotPool(4096, 2, pin=False)
    pool.take(), pool.take()
    with pytest.raises(XdsError, match="one thread holds all 2 slots"):
        pool.take()


def test_a_slot_in_use_is_waited_for_in_the_order_of_giving():
    pool = SlotPool(4096, 2, pin=False)
    first, second = pool.take(), pool.take()
    waits = []
    pool.give(second, after=lambda: waits.append("second"))
    pool.give(first, after=lambda: waits.append("first"))
    assert pool.take().data_ptr() == second.data_ptr() and waits == ["second"]
    assert pool.take().data_ptr() == first.data_ptr() and waits == ["second", "first"]


def test_a_failed_use_is_raised_once_and_frees_the_slot():
    def fail():
        raise XdsError("the disk failed")

    pool = SlotPool(4096, 1, pin=False)
    pool.give(pool.take(), after=fail)
    with pytest.raises(XdsError, match="the disk failed"):
        pool.take()
    pool.take()


def test_a_slot_stays_in_use_when_the_wait_for_it_is_interrupted():
    interrupts = [KeyboardInterrupt(), None]

    def interrupted():
        error = interrupts.pop(0)
        if error is not None:
            raise error

    pool = SlotPool(4096, 1, pin=False)
    pool.give(pool.take(), after=interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.take()
    pool.take()
    assert not interrupts


def test_a_thread_waits_while_another_one_waits_for_a_pending_slot():
    """All other slots are held by the thread that takes; it does not wait for itself."""
    pool = SlotPool(4096, 2, pin=False)
    pool.take()
    pending, is_over = pool.take(), threading.Event()
    pool.give(pending, after=lambda: is_over.wait(SECONDS))
    taken = []
    other = threading.Thread(target=lambda: taken.append(pool.take()))
    other.start()
    while pool._pending:
        time.sleep(0.001)
    threading.Timer(0.05, is_over.set).start()
    threading.Timer(0.1, lambda: pool.give(taken[0])).start()
    assert pool.take().data_ptr() == pending.data_ptr()
    other.join(SECONDS)


@pytest.mark.parametrize("make", [lambda slot: torch.empty(8), lambda slot: slot[1:]])
def test_a_tensor_that_is_no_slot_is_refused(make):
    pool = SlotPool(4096, 2, pin=False)
    with pytest.raises(XdsError, match="did not hand it out"):
        pool.give(make(pool.take()))


def test_many_threads_never_share_a_slot():
    pool = SlotPool(4096, 3, pin=False)

    def work(number):
        for _ in range(50):
            slot = pool.take()
            slot.fill_(number)
            time.sleep(0)
            assert slot.unique().tolist() == [number]
            pool.give(slot, after=None if number % 2 else lambda: time.sleep(0))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6), timeout=SECONDS))
    assert sorted(pool.take().data_ptr() for _ in range(3))
