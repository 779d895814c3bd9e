"""Tests of ranks that read each other's memory: the bits of messages, for every dtype, place and size."""

from __future__ import annotations

import ctypes
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from warm_ranks import warm

from xds.ops.comm.collectives import Collectives
from xds.ops.comm.memory.operations import KINDS
from xds.ops.comm.opening import open_collectives
from xds.ops.comm.point_to_point import PeerToPeer
from xds.ops.comm.shared_memory import SharedMemory
from xds.ops.libraries import open_plain

CPU = torch.device("cpu")
NUMELS = (1, 7, 1000, 20_000)  # copied when it is sent, and read in place
PAIRS = [(one, one) for one in KINDS] + [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.int64, torch.int64),
]


def both() -> tuple[Collectives, Collectives]:
    group = dist.group.WORLD
    assert group is not None
    found = open_collectives(group, CPU)
    assert isinstance(found, SharedMemory)
    return found, PeerToPeer(group, CPU)


def _random(shared: Collectives, numel: int, dtype: torch.dtype, is_near: bool) -> torch.Tensor:
    found = shared.empty(numel, dtype) if is_near else torch.empty(numel, dtype=dtype)
    return found.copy_(torch.randn(numel).mul_(100))


def sums_that_differ(is_near: bool) -> list[str]:
    shared, plain = both()
    torch.manual_seed(shared.rank)
    bad = []
    for part, out in PAIRS:
        for numel in NUMELS:
            for add in (False, True):
                flat = _random(shared, numel * shared.world_size, part, is_near)
                found = [torch.ones(numel, dtype=out) for _ in range(2)]
                for one, by in zip(found, (shared, plain), strict=True):
                    by.reduce_scatter(flat, one, add=add, buffer=1, kind="sum").wait()
                if not found[0].equal(found[1]):
                    bad.append(f"{part} into {out}, {numel}, add {add}")
            found = [flat.clone(), flat.clone()]
            for one, by in zip(found, (shared, plain), strict=True):
                by.all_reduce(one, what="a sum", kind="sum").wait()
            if not found[0].equal(found[1]):
                bad.append(f"all_reduce of {part}, {numel}")
    return bad


def sums_of_every_instruction_set() -> list[str]:
    bad = []
    for name in ("baseline", "avx2", "avx512"):  # the widest one, where the processor lacks it
        with mock.patch.dict(os.environ, XDS_CPU_ISA=name):
            bad += sums_that_differ(True)
    return bad


def test_every_instruction_set_has_the_same_bits() -> None:
    assert warm(2).run(sums_of_every_instruction_set) == [[]] * 2


@pytest.mark.parametrize("is_near", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_sums_have_the_bits_of_messages(world: int, is_near: bool) -> None:
    assert warm(world).run(sums_that_differ, is_near) == [[]] * world


def copies_that_differ(is_near: bool) -> list[str]:
    shared, plain = both()
    torch.manual_seed(shared.rank)
    world, bad = shared.world_size, []
    for numel in NUMELS:
        shard = _random(shared, numel, torch.float32, is_near)
        found = [torch.zeros(numel * world) for _ in range(3)]
        shared.all_gather(found[0], shard, buffer=1, kind="gather").wait()
        plain.all_gather(found[1], shard, buffer=1, kind="gather").wait()
        shared.shard_of(found[2]).copy_(shard)
        shared.all_gather(found[2], shared.shard_of(found[2]), buffer=1, kind="gather").wait()
        if not (found[0].equal(found[1]) and found[2].equal(found[1])):
            bad.append(f"all_gather of {numel}")
        for source in range(world):
            sent = [shard.clone(), shard.clone()]
            shared.broadcast(sent[0], source)
            plain.broadcast(sent[1], source)
            if not sent[0].equal(sent[1]):
                bad.append(f"broadcast of {numel} from {source}")
        target, origin = (shared.rank + 1) % world, (shared.rank - 1) % world
        got = torch.empty(numel)
        sent_on = shared.send(shard, target, number=5, what="a message", kind="send")
        shared.receive(got, origin, number=5, what="a message").wait()
        sent_on.wait()
        if not got.equal(found[1][origin * numel :][:numel]):
            bad.append(f"message of {numel}")
    shared.barrier()
    return bad


@pytest.mark.parametrize("is_near", [False, True])
def test_copies_have_the_values_of_messages(is_near: bool) -> None:
    assert warm(3).run(copies_that_differ, is_near) == [[]] * 3


def of_odd_layout() -> list[bool]:
    """Broadcasts of strided, expanded, 0-dim and empty tensors; a strided message is refused."""
    shared, _ = both()
    want = [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(8.0)[::2],
        torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.empty(0),
    ]
    equal = []
    for value in want:
        found = torch.zeros(20).as_strided(value.shape, value.stride())
        shared.broadcast(found.copy_(value) if shared.rank == 0 else found)
        equal.append(found.equal(value))
    got = torch.zeros(4)
    shared.broadcast(torch.ones(1).expand(4) if shared.rank == 0 else got)
    equal.append(shared.rank == 0 or got.equal(torch.ones(4)))
    with pytest.raises(ValueError, match=r"strides \(2,\) cannot be sent"):
        shared.send(torch.ones(8)[::2], 1 - shared.rank, number=0, what="a message", kind="send")
    shared.barrier()
    return equal


def test_tensors_of_odd_layout_arrive_or_are_refused() -> None:
    assert warm(2).run(of_odd_layout) == [[True] * 6] * 2


def crossing_in_place() -> list[bool]:
    """Large shards that peers read in place, waited for in opposite orders."""
    shared, _ = both()
    world, numel = shared.world_size, 50_000
    fulls, handles = [], []
    for at in range(3):
        shard = shared.empty(numel, torch.float32).fill_(10 * at + shared.rank)
        fulls.append(torch.empty(numel * world))
        handles.append(shared.all_gather(fulls[-1], shard, buffer=at, kind="gather"))
    for handle in handles if shared.rank % 2 else reversed(handles):
        handle.wait()
    return [
        bool((full.view(world, -1) == torch.arange(world).view(-1, 1) + 10 * at).all())
        for at, full in enumerate(fulls)
    ]


def test_ranks_may_wait_in_different_orders() -> None:
    assert warm(2).run(crossing_in_place) == [[True] * 3] * 2


def freed_memory() -> tuple[bool, bool]:
    """The tensor's memory is used again once it is gone, and small tensors stay private."""
    shared, _ = both()
    one = shared.empty(1 << 20, torch.float32)
    place = one.data_ptr()
    view = one[5:]
    del one
    other = shared.empty(1 << 20, torch.float32)
    is_apart = other.data_ptr() != place and view.data_ptr() == place + 20
    del view, other
    return is_apart, shared.empty(1 << 20, torch.float32).data_ptr() == place


def test_memory_is_freed_with_the_last_view() -> None:
    assert warm(2).run(freed_memory) == [(True, True)] * 2


def test_the_library_is_plain_functions() -> None:
    library = open_plain("memory")
    assert isinstance(library, ctypes.CDLL)
    assert library.xds_control_bytes() % 4096 == 0


def bytes_counted() -> tuple[dict[str, int], dict[str, int]]:
    shared, plain = both()
    for by in (shared, plain):
        by.sent_bytes.clear()
        flat = torch.ones(12 * by.world_size)
        by.reduce_scatter(flat, torch.empty(12), add=False, buffer=1, kind="sum").wait()
        by.all_gather(flat, by.shard_of(flat), buffer=1, kind="gather").wait()
        by.sum(torch.ones(5), what="a sum", kind="small")
        by.broadcast(torch.ones(5))
    return shared.sent_bytes, plain.sent_bytes


def test_bytes_are_those_of_messages() -> None:
    for found, want in warm(3).run(bytes_counted):
        assert found == want
