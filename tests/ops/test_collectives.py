"""Collectives through shared memory, messages and a backend: values, bits, bytes, order, memory."""

from __future__ import annotations

import ctypes
import os
import time
from datetime import timedelta
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import run_processes, run_ranks
from torch import Tensor

from xds.ops.comm.backend import SingleRank, set_timeout
from xds.ops.comm.collectives import Collectives
from xds.ops.comm.config import Communication
from xds.ops.comm.exchange import EqualParts, agree
from xds.ops.comm.memory.operations import KINDS as DTYPES
from xds.ops.comm.memory.shared_memory import SharedMemoryBackend
from xds.ops.comm.nccl import NcclBackend
from xds.ops.comm.opening import member_of, open_collectives, open_nccl
from xds.ops.comm.point_to_point import GlooBackend
from xds.ops.libraries import open_plain
from xds.utils.errors import UsageError

CPU = torch.device("cpu")
KINDS = {"memory": SharedMemoryBackend, "messages": GlooBackend, "native": NcclBackend}
NUMELS = (1, 7, 1000, 20_000)  # copied when it is sent, and read in place


def opened(kind: str) -> Collectives:
    """Through "memory" or "messages" of gloo, or the "native" ones of gloo."""
    group = dist.group.WORLD
    assert group is not None
    section = Communication(shared_memory=kind == "memory")
    if kind == "native":
        return open_nccl(member_of(group, CPU))
    found = open_collectives(group, CPU, section=section)
    assert type(found.backend) is KINDS[kind]
    return found


def failure_of_1(text: str) -> str:
    """What each rank raises where rank 1 has failed with `text`."""
    with pytest.raises(UsageError) as caught:
        collectives = open_collectives(dist.group.WORLD, CPU)
        agree(collectives, text if dist.get_rank() == 1 else "", UsageError, "a check")
    return str(caught.value)


def test_a_long_sentence_of_another_rank_may_end_within_a_character() -> None:
    for text in ("\u00fc" * 600, "x" + "\u00fc" * 600):
        for message in run_ranks(failure_of_1, 2, text):
            assert message.startswith("a check failed on rank 1: ") and "\u00fc" * 200 in message


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def summed(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of all ranks, added in rank order."""
    total = torch.zeros(numel)
    for peer in range(dist.get_world_size()):
        total = total + values(peer, numel, dtype).float()
    return total


# -- values and bytes ---------------------------------------------------------------------------------------


def sums_gathers_and_exchanges(kind: str) -> None:
    collectives = opened(kind)
    rank, world, is_native = collectives.rank, collectives.world_size, kind == "native"
    own, peers = slice(48 * rank, 48 * rank + 48), world - 1
    for dtype, add in product((torch.float32, torch.bfloat16), (False, True)):
        if is_native and dtype == torch.bfloat16:
            continue  # gloo's own sum works in bf16: no exact value to compare with
        collectives.sent_bytes.clear()
        flat, out = values(rank, 48 * world, dtype), torch.ones(48)
        collectives.reduce_scatter(flat, out, add=add, buffer=0, kind="reduce").wait()
        wanted = summed(48 * world, dtype)[own] + (1 if add else 0)
        case = (kind, dtype, add)
        assert torch.allclose(out, wanted, rtol=1e-5) if is_native else out.equal(wanted), case
        full = torch.empty(48 * world)
        collectives.all_gather(full, wanted, buffer=1, kind="gather").wait()
        assert full.equal(summed(48 * world, dtype) + (1 if add else 0)), case
        table = collectives.gather_small(torch.tensor([float(rank), 2.0 * rank]))
        assert table.tolist() == [[float(r), 2.0 * r] for r in range(world)], case
        sent = {"reduce": 48 * dtype.itemsize, "gather": 48 * 4, "control": 8}
        assert collectives.sent_bytes == {name: peers * size for name, size in sent.items()}, case
    collectives.sent_bytes.clear()
    numels = (1, 10, 231)  # the first is smaller than the number of ranks
    for numel in numels:
        mine = values(rank, numel)
        collectives.all_reduce(mine, what="a sum", kind="sum").wait()
        wanted = summed(numel)
        assert torch.allclose(mine, wanted, rtol=1e-5) if is_native else mine.equal(wanted), numel
    if is_native:
        return  # gloo's own all_to_all takes equal parts alone
    assert collectives.sent_bytes["sum"] == sum(2 * peers * 4 * n // world for n in numels)
    parts = [torch.full((peer,), float(10 * rank + peer)) for peer in range(world)]
    outs = [torch.empty(rank) for _ in range(world)]
    collectives.all_to_all(outs, parts, what="heads", kind="exchange").wait()
    assert [out.tolist() for out in outs] == [[10.0 * p + rank] * rank for p in range(world)]
    halves, whole = EqualParts(collectives, "joins"), values(0, 28).view(4, 7)
    part = halves.own(whole)
    # the whole is free while the part is kept
    assert part.untyped_storage().nbytes() == 4 * part.numel() == 4 * halves.numel_of(28)
    assert halves.joined(part, whole.shape, "parts").equal(whole)


def uneven_parts(kind: str) -> tuple[int, int]:
    """Bytes that this rank has sent, and elements of its part."""
    collectives = opened(kind)
    rank, world = collectives.rank, collectives.world_size
    bounds = [(0, 0), (0, 5), (5, 12)][-world:]  # the first of three holds nothing
    numel = bounds[-1][1]
    whole = values(7, numel)
    mine = whole[slice(*bounds[rank])].clone()
    everywhere, part = torch.empty(numel), torch.empty_like(mine)
    collectives.collect(everywhere, mine, bounds)
    at_last = torch.empty(numel) if rank == world - 1 else None
    collectives.collect(at_last, mine, bounds, target=world - 1)
    collectives.scatter(whole if rank == 1 else None, part, bounds, source=1)
    assert everywhere.equal(whole) and part.equal(mine), kind
    assert at_last is None or at_last.equal(whole), kind
    return collectives.sent_bytes.get("access", 0), mine.numel()


def each_kind() -> dict[str, tuple[int, int]]:
    found = {}
    for kind in KINDS:
        sums_gathers_and_exchanges(kind)
        found[kind] = uneven_parts(kind)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_values_and_bytes_of_every_kind(world: int) -> None:
    ranks = run_processes(each_kind, world)
    for kind in ("memory", "messages"):
        numels = [rank[kind][1] for rank in ranks]
        collected = (world - 1) * sum(numels) + sum(numels) - numels[-1]
        sent = sum(rank[kind][0] for rank in ranks)
        assert sent == 4 * (collected + sum(numels) - numels[1]), kind


def test_one_rank_sends_nothing() -> None:
    collectives = open_collectives(None, CPU)
    assert isinstance(collectives.backend, SingleRank)
    out, full = torch.zeros(4), torch.zeros(4)
    collectives.reduce_scatter(torch.ones(4), out, add=True, buffer=0, kind="reduce").wait()
    collectives.all_gather(full, out, buffer=0, kind="gather").wait()
    assert full.tolist() == [1.0] * 4 and collectives.sent_bytes == {}


# -- shared memory has the bits of messages -----------------------------------------------------------------


def _random(shared: Collectives, numel: int, dtype: torch.dtype, is_near: bool) -> Tensor:
    found = shared.empty(numel, dtype) if is_near else torch.empty(numel, dtype=dtype)
    return found.copy_(torch.randn(numel).mul_(100))


def sums_that_differ(is_near: bool) -> list[str]:
    both = opened("memory"), opened("messages")
    shared, bad = both[0], []
    torch.manual_seed(shared.rank)
    pairs = [*((one, one) for one in DTYPES), (torch.bfloat16, torch.float32)]
    for part, out in [*pairs, (torch.float16, torch.float32), (torch.int64, torch.int64)]:
        for numel in NUMELS:
            for add in (False, True):
                flat = _random(shared, numel * shared.world_size, part, is_near)
                found = [torch.ones(numel, dtype=out) for _ in both]
                for one, by in zip(found, both, strict=True):
                    by.reduce_scatter(flat, one, add=add, buffer=1, kind="sum").wait()
                if not found[0].equal(found[1]):
                    bad.append(f"{part} into {out}, {numel}, add {add}")
            found = [flat.clone(), flat.clone()]
            for one, by in zip(found, both, strict=True):
                by.all_reduce(one, what="a sum", kind="sum").wait()
            if not found[0].equal(found[1]):
                bad.append(f"all_reduce of {part}, {numel}")
    return bad


def copies_that_differ(is_near: bool) -> list[str]:
    shared, plain = opened("memory"), opened("messages")
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
        sent_on = shared.send(shard, target, what="a message", kind="send")
        shared.receive(got, origin, what="a message").wait()
        sent_on.wait()
        if not got.equal(found[1][origin * numel :][:numel]):
            bad.append(f"message of {numel}")
    shared.barrier()
    return bad


def bits_that_differ() -> list[str]:
    bad = [said for near in (False, True) for said in sums_that_differ(near)]
    bad += [said for near in (False, True) for said in copies_that_differ(near)]
    for name in ("baseline", "avx2", "avx512"):  # the widest one, where the processor lacks it
        with mock.patch.dict(os.environ, XDS_CPU_ISA=name):
            bad += [f"{name}: {said}" for said in sums_that_differ(True)]
    return bad


def test_shared_memory_has_the_bits_of_messages() -> None:
    assert run_processes(bits_that_differ, 3) == [[]] * 3


def of_odd_layout() -> None:
    """Broadcasts of strided, expanded, 0-dim and empty tensors; a strided message is refused."""
    for kind in ("messages", "memory"):
        shared = opened(kind)
        dtypes = (torch.int16, torch.uint32, torch.float8_e5m2, torch.bool, torch.complex64)
        for dtype in dtypes:
            found = torch.zeros(5, dtype=torch.float32).to(dtype)
            value = torch.tensor([0.0, 1, 2, 3, 4]).to(dtype)
            shared.broadcast(found.copy_(value) if shared.rank == 0 else found)
            assert found.view(torch.uint8).equal(value.view(torch.uint8)), (kind, dtype)
    for value in (
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(8.0)[::2],
        torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.empty(0),
    ):
        found = torch.zeros(20).as_strided(value.shape, value.stride())
        shared.broadcast(found.copy_(value) if shared.rank == 0 else found)
        assert found.equal(value), value.shape
    got = torch.zeros(4)
    shared.broadcast(torch.ones(1).expand(4) if shared.rank == 0 else got)
    assert shared.rank == 0 or got.equal(torch.ones(4))
    with pytest.raises(ValueError, match=r"strides \(2,\) cannot be sent"):
        shared.send(torch.ones(8)[::2], 1 - shared.rank, what="a message", kind="send")
    shared.barrier()


def freed_memory() -> None:
    """A tensor's memory is used again once its last view is gone, and small tensors stay private."""
    shared = opened("memory")
    one = shared.empty(1 << 20, torch.float32)
    place, view = one.data_ptr(), one[5:]
    del one
    other = shared.empty(1 << 20, torch.float32)
    assert other.data_ptr() != place and view.data_ptr() == place + 20
    del view, other
    assert shared.empty(1 << 20, torch.float32).data_ptr() == place


# -- order --------------------------------------------------------------------------------------------------


def crossing() -> None:
    """Small and large gathers, started in opposite orders on even and odd ranks, and waited for in others."""
    for kind, numel in product(("memory", "messages"), (16, 50_000)):
        collectives = opened(kind)
        rank, world = collectives.rank, collectives.world_size
        fulls, handles = [torch.empty(numel * (at + 1) * world) for at in range(3)], {}
        for at in (0, 1, 2) if rank % 2 else (2, 1, 0):
            shard = collectives.empty(numel * (at + 1), torch.float32).fill_(10 * at + rank)
            handles[at] = collectives.all_gather(fulls[at], shard, buffer=at, kind="gather")
        for at in (1, 0, 2) if rank else (2, 0, 1):
            handles[at].wait()
            handles[at].wait()  # a second wait is harmless
        for at, full in enumerate(fulls):
            wanted = torch.arange(world).view(-1, 1) + 10 * at
            assert (full.view(world, -1) == wanted).all(), (kind, numel, at)


def dropped() -> None:
    """Nobody waits for several collectives, and one rank begins them after the other's are dropped."""
    for kind, late in product(("memory", "messages"), (0, 1)):
        first, second = opened(kind), opened(kind)
        store, name = first.store(), f"dropped {kind} {late}"
        assert store is not None
        while first.rank == late and store.read(name) is None:
            time.sleep(0.01)
        flat, shard, peer = torch.ones(8), torch.ones(4), 1 - first.rank
        first.reduce_scatter(flat, torch.empty(4), add=False, buffer=0, kind="reduce")
        first.all_gather(torch.empty(8), shard, buffer=1, kind="gather")
        first.start_gather_small(torch.ones(3))
        first.send(shard, peer, what="a message", kind="send")
        first.receive(torch.empty(4), peer, what="a message")
        del flat, shard
        if first.rank != late:
            store.set(name, "")
        table = second.gather_small(torch.tensor([float(second.rank)]))
        assert table.tolist() == [[0.0], [1.0]], (kind, late)


def test_ranks_may_start_and_wait_in_different_orders() -> None:
    run_processes(crossing, 2)
    run_processes(crossing, 3)


def late_message() -> Tensor:
    """Of a rank that is slower than the timeout with which the group was opened."""
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    set_timeout(group, timedelta(seconds=60))
    collectives = open_collectives(group, CPU, section=Communication(shared_memory=False))
    if dist.get_rank():
        time.sleep(1)
    return collectives.gather_small(torch.ones(1), what="a late message").clone()


def test_a_group_waits_for_messages_as_long_as_its_later_timeout_says() -> None:
    assert [table.tolist() for table in run_processes(late_message, 2)] == [[[1.0], [1.0]]] * 2


def test_collectives_that_nobody_waits_for_do_not_hold_up_later_ones() -> None:
    run_processes(dropped, 2)


def test_tensors_of_odd_layout_and_memory_that_is_freed() -> None:
    run_processes(of_odd_layout, 2)
    run_processes(freed_memory, 2)


def test_the_library_is_plain_functions() -> None:
    library = open_plain("memory")
    assert isinstance(library, ctypes.CDLL)
    assert library.xds_control_bytes() % 4096 == 0
