"""Host memory: exact size, alignment, when it is registered and freed, and what a failure says."""

from __future__ import annotations

import gc
import mmap
import os
import re
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from xds.offload import pinned
from xds.offload.pinned import PageableWarning, host_memory
from xds.offload.reused import HostPool
from xds.utils.errors import UsageError


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", runtime.device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.record("synchronize"))
    pinned._failures.cache_clear()
    return runtime


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 3_000_001])
@pytest.mark.parametrize("pin", [False, True])
def test_memory_has_the_exact_size_is_zeroed_and_aligned_to_a_page(num_bytes, pin, cudart):
    memory = host_memory(num_bytes, pin=pin)
    assert memory.shape == (num_bytes,) and memory.dtype == torch.uint8
    assert memory.data_ptr() % 4096 == 0
    assert memory.untyped_storage().nbytes() == num_bytes
    assert not memory.any()
    memory.fill_(7)
    assert cudart.asked == ([num_bytes] if pin else [])


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
        assert not pinned._register(memory.data_ptr(), 3_000_001)
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
