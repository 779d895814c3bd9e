"""Tests of ranks on several machines: sums on two levels, bytes across. Letters: the machines of ranks."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks, run_processes, run_ranks
from placed_ranks import placed
from runs import config

import xds
from xds.ops.comm.collectives import Collectives
from xds.ops.comm.config import Communication
from xds.ops.comm.memory.machines import MachinesBackend
from xds.ops.comm.opening import PartOf, member_of, open_collectives
from xds.ops.comm.point_to_point import GlooBackend
from xds.ops.comm.threads import OrderedThreads
from xds.ops.watch import reports

CPU = torch.device("cpu")
LAYOUTS = ("aabb", "aab", "abab")
NUMELS = (
    1,
    3,
    1001,
    20_000,
)  # of a shard: fewer than there are ranks, and some that are read in place
PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64),
    (torch.int64, torch.int64),  # which has no native sum: to each rank
]


def both(layout: str, *, is_hierarchical: bool = True) -> tuple[Collectives, Collectives]:
    group = dist.group.WORLD
    assert group is not None
    section = Communication.model_validate({"hierarchical": is_hierarchical})
    with placed(layout):
        found = open_collectives(group, CPU, section=section)
    assert isinstance(found.backend, MachinesBackend)
    plain = Collectives(GlooBackend(member_of(group, CPU)))
    plain.set_hosts([ord(letter) for letter in layout])
    return found, plain


def _all_flats(layout: str, numel: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """The flat of each rank, as every rank knows them."""
    generator = torch.Generator().manual_seed(seed)
    size = numel * len(layout)
    return [torch.randn(size, generator=generator).mul_(100).to(dtype) for _ in layout]


def _on_two_levels(layout: str, flats: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """out + the sum: of each machine in rank order, in the dtype that is sent; then machines by first rank."""
    sums = []
    for letter in dict.fromkeys(layout):
        each = [flat for flat, at in zip(flats, layout, strict=True) if at == letter]
        total = each[0]
        for flat in each[1:]:
            total = total + flat
        sums.append(total.to(out.dtype))
    whole = sums[0]
    for one in sums[1:]:
        whole = whole + one
    return out + whole


def _near(of: Collectives, tensor: torch.Tensor, is_near: bool) -> torch.Tensor:
    return of.empty(tensor.numel(), tensor.dtype).copy_(tensor) if is_near else tensor.clone()


def results_that_differ(layout: str) -> list[str]:
    """reduce_scatter and all_gather of every dtype, size and place."""
    machines, _ = both(layout)
    rank, bad = machines.rank, []
    for seed, (part, dtype) in enumerate(PAIRS):
        for numel in NUMELS:
            flats = _all_flats(layout, numel, part, seed)
            flat = _near(machines, flats[rank], numel % 2 == 0)
            for add in (False, True):
                out = torch.full((numel,), 3, dtype=dtype)
                begin = out if add else torch.zeros_like(out)
                wanted = _on_two_levels(layout, [machines.shard_of(f) for f in flats], begin)
                machines.reduce_scatter(flat, out, add=add, buffer=1, kind="sum").wait()
                if not out.equal(wanted):
                    bad.append(f"sum of {part} into {dtype}, {numel}, add {add}")
            whole = _near(machines, torch.zeros_like(flat), numel % 2 == 0)
            shard = machines.shard_of(flats[rank]).clone()
            machines.all_gather(whole, shard, buffer=1, kind="gather").wait()
            wanted = torch.cat([machines.shard_of(f, at) for at, f in enumerate(flats)])
            if not whole.equal(wanted):
                bad.append(f"all_gather of {part}, {numel}")
    return bad


def whole_sums_that_differ(layout: str) -> list[str]:
    """sum_whole against reduce_scatter and all_gather: two at once, and waits in both orders."""
    machines, _ = both(layout)
    rank, bad = machines.rank, []
    for seed, (part, dtype) in enumerate(PAIRS[:-1]):
        for numel in NUMELS:
            flats = [_all_flats(layout, numel, part, seed + add)[rank] for add in (0, 1)]
            wanted, found, handles = [], [], []
            for flat in flats:
                out, whole = torch.empty(numel, dtype=dtype), torch.empty_like(flat)
                machines.reduce_scatter(flat, out, add=False, buffer=1, kind="sum").wait()
                machines.all_gather(whole, out.to(part), buffer=1, kind="gather").wait()
                wanted.append((out, whole))
            for buffer, flat in enumerate(flats):
                whole = _near(machines, flat, numel % 2 == 0)
                out = machines.shard_of(whole) if part == dtype else torch.empty(numel, dtype=dtype)
                if not machines.sums_whole(whole, out):
                    continue
                handles += machines.sum_whole(whole, out, buffer=buffer, kinds=("sum", "gather"))
                found.append((out, whole))
            for handle in handles[:: 1 if numel % 3 else -1]:
                handle.wait()
            if len(found) != len(flats):
                bad.append(f"{part}, {numel}: no whole sum")
            for got, want in zip(found, wanted, strict=False):
                if not (got[0].equal(want[0]) and got[1].equal(want[1])):
                    bad.append(f"whole sum of {part} into {dtype}, {numel}")
    return bad


def bits_that_differ(layout: str) -> list[str]:
    """With hierarchical: false everything has the bits of messages, and else all but sums of gradients."""
    bad = []
    for is_hierarchical in (True, False):
        found, plain = both(layout, is_hierarchical=is_hierarchical)
        rank, world, pair = found.rank, found.world_size, (found, plain)
        for numel in (2, 20_000):
            torch.manual_seed(rank)
            values = torch.randn(numel * world)
            got: list[list[torch.Tensor]] = []
            for by in pair:
                summed, mixed = values.clone(), torch.empty_like(values)
                by.all_reduce(summed, what="a sum", kind="sum").wait()
                parts = [by.shard_of(values, peer) for peer in range(world)]
                outs = [by.shard_of(mixed, peer) for peer in range(world)]
                by.all_to_all(outs, parts, what="parts", kind="parts").wait()
                table, handle = by.start_gather_small(values[:3])
                handle.wait()
                out, message = torch.ones(numel), torch.empty(numel)
                if not is_hierarchical:
                    by.reduce_scatter(values, out, add=True, buffer=1, kind="sum").wait()
                sent = by.send(values[:numel], (rank + 1) % world, what="m", kind="m")
                by.receive(message, (rank - 1) % world, what="m").wait()
                sent.wait()
                got.append([summed, mixed, table, by.gather_small(values[:2]), out, message])
            for at, (one, other) in enumerate(zip(*got, strict=True)):
                if not one.equal(other):
                    bad.append(f"result {at} of {numel}, hierarchical {is_hierarchical}")
    return bad


def bytes_across(layout: str, numel: int) -> list[dict[str, int]]:
    machines, plain = both(layout)
    for by in (machines, plain):
        by.sent_across_bytes.clear()
        flat = torch.ones(numel * by.world_size)
        by.reduce_scatter(flat, torch.empty(numel), add=False, buffer=1, kind="sum").wait()
        by.all_gather(flat, by.shard_of(flat), buffer=1, kind="gather").wait()
    return [machines.sent_across_bytes, plain.sent_across_bytes]


def any_order(layout: str) -> list[bool]:
    """Ranks start two collectives in different orders, and some wait for one before they start the other."""
    machines, _ = both(layout)
    world, numel, rank = machines.world_size, 30_000, machines.rank
    good = []
    for turn in range(3):
        flat, out = torch.full((numel * world,), 1.0 + rank), torch.empty(numel)
        whole, shard = torch.empty(numel * world), torch.full((numel,), 1.0 * rank)
        starts = {
            "sum": lambda f=flat, o=out: machines.reduce_scatter(
                f, o, add=False, buffer=2, kind="sum"
            ),
            "gather": lambda w=whole, s=shard: machines.all_gather(w, s, buffer=4, kind="gather"),
        }
        is_odd = (rank + turn) % 2
        first, second = ("sum", "gather") if is_odd else ("gather", "sum")
        handle = starts[first]()
        if is_odd:
            handle.wait()
        last = starts[second]()
        last.wait()
        handle.wait()
        good.append(bool((out == world * (world + 1) / 2).all()))
        good.append(whole.equal(torch.arange(world).repeat_interleave(numel).float()))
    return good


def each(layout: str) -> tuple[list[str], list[bool], list[dict[str, int]]]:
    bad = results_that_differ(layout) + whole_sums_that_differ(layout) + bits_that_differ(layout)
    return bad, any_order(layout), bytes_across(layout, 5)  # parts of a machine are unequal


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_those_of_the_written_order_and_each_byte_crosses_once(layout: str) -> None:
    """Whole sums have the bits of two collectives; without levels, all have those of messages."""
    found = run_processes(each, len(layout), layout)
    assert [rank[:2] for rank in found] == [([], [True] * 6)] * len(layout)
    shard = 4 * 5
    for letter in dict.fromkeys(layout):
        here, there = layout.count(letter), len(layout) - layout.count(letter)
        ranks = [sent for (_, _, sent), at in zip(found, layout, strict=True) if at == letter]
        assert sum(levels["sum"] for levels, _ in ranks) == there * shard
        assert sum(levels["gather"] for levels, _ in ranks) == here * shard
        assert {plain["sum"] for _, plain in ranks} == {there * shard}


def bytes_across_of_pairs() -> int:
    world, pairs = open_collectives(dist.group.WORLD, CPU), [(0, 1), (2, 3)]
    groups = [dist.new_group(pair) for pair in pairs]
    at = world.rank // 2
    by = open_collectives(groups[at], CPU, PartOf(world, pairs[at]))
    by.set_hosts([0, 0, 1, 1])
    flat = torch.ones(8)
    by.all_gather(flat, by.shard_of(flat), buffer=1, kind="gather").wait()
    return sum(by.sent_across_bytes.values())


def test_a_group_inside_a_machine_sends_nothing_across() -> None:
    assert run_ranks(bytes_across_of_pairs, 4) == [0] * 4


def losses_of_stages(layout: str, section: dict[str, Any], *stages: int) -> list[list[float]]:
    return [losses(layout, stage, section) for stage in stages]


def losses(layout: str, stage: int, section: dict[str, Any]) -> list[float]:
    """Of a few steps. stage, section: of the config, `communication`."""
    torch.manual_seed(3)
    sizes = [(24, 40), (40, 40), (40, 24)]
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    settings = config(stage, clip=0.1, communication=section)
    with placed(layout):
        engine = xds.initialize(model, settings)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(8):
        x = torch.randn(2, 24, generator=generator)
        loss = (engine(x) - x.flip(1)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    engine.destroy()
    return found


@pytest.mark.parametrize("layout", ["aab", "aaba"])
def test_stages_are_equal_and_near_one_machine(layout: str) -> None:
    world = len(layout)
    by_stage = run_processes(losses_of_stages, world, layout, {}, 0, 1, 2, 3)
    assert all(one == rank[0] for rank in by_stage for one in rank)
    pairs = {"hierarchical": False}
    one_machine = run_processes(losses_of_stages, world, "a" * world, {}, 2)
    assert run_processes(losses_of_stages, world, layout, pairs, 2) == one_machine
    for found, wanted in zip(by_stage, one_machine, strict=True):
        assert found[0] == pytest.approx(wanted[0], rel=1e-5)


def until_a_rank_ends(layout: str, folder: str) -> None:
    """Rank 1 ends; each other rank writes the error of its wait, long before the timeout of a minute."""
    machines, _ = both(layout)
    reports.PATIENCE_SECONDS = 0.1  # for reports of others
    flat, out = torch.ones(20_000 * machines.world_size), torch.empty(20_000)
    machines.reduce_scatter(flat, out, add=False, buffer=1, kind="sum").wait()
    if machines.rank == 1:
        os._exit(0)
    told = ""
    try:
        machines.reduce_scatter(flat, out, add=False, buffer=1, kind="sum").wait()
    except xds.XdsError as error:
        told = str(error)
    Path(folder, str(machines.rank)).write_text(told)


def test_a_rank_that_ends_is_noticed_on_all_machines(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1"):  # it gave no answer
        run_new_ranks(until_a_rank_ends, 4, "aabb", str(tmp_path), timeout_seconds=60)
    for rank in (0, 2, 3):
        told = (tmp_path / str(rank)).read_text()
        assert "rank 1" in told and "Timed out" not in told


def test_jobs_of_a_key_run_in_order_and_others_meanwhile() -> None:
    jobs, free, seen = OrderedThreads("xds-test"), threading.Event(), []

    def blocked() -> None:
        free.wait(10)
        seen.append(1)

    first = jobs.add("a", blocked)
    second = jobs.add("a", lambda: seen.append(2))
    other = jobs.add("b", lambda: seen.append(0))
    assert other.wait(10) and not second.wait(0.01)
    free.set()
    assert first.wait(10) and second.wait(10)
    assert seen == [0, 1, 2]
    failed = jobs.add("a", lambda: seen.index(7))
    assert failed.wait(10) and isinstance(failed.error, ValueError)
