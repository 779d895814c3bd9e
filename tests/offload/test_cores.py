"""Tests: ranks of one machine divide its cores for updates, and no bit depends on the number of threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks
from runs import config

import xds
from xds.offload.cores import (
    Choice,
    Core,
    Machine,
    choose,
    cores_of_rank,
    place_updates,
    read_list,
    read_quota,
    this_machine,
)
from xds.offload.job_queues import ThreadQueue


def machine(num_nodes: int, physical: int, threads: int, quota: float | None = None) -> Machine:
    """Cores numbered as Linux does: first one logical core of each physical one, then their siblings."""
    count = num_nodes * physical
    found = [
        Core(at // physical, at, at + sibling * count)
        for sibling in range(threads)
        for at in range(count)
    ]
    return Machine(tuple(found), len(found), quota)


@pytest.mark.parametrize(
    ("nodes", "physical", "threads", "num_ranks", "expected"),
    [
        (1, 4, 1, 2, [{0, 1}, {2, 3}]),
        (1, 5, 1, 2, [{0, 1}, {2, 3, 4}]),
        (1, 2, 2, 2, [{0, 2}, {1, 3}]),  # siblings stay together
        (1, 2, 2, 3, [{0}, {2}, {1, 3}]),  # more ranks than physical cores
        (2, 2, 2, 2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),  # a node for each rank
        (2, 2, 1, 4, [{0}, {1}, {2}, {3}]),
        (1, 2, 1, 3, [set(), set(), set()]),
    ],
)
def test_ranks_divide_the_cores(
    nodes: int, physical: int, threads: int, num_ranks: int, expected: list[set[int]]
) -> None:
    cores = machine(nodes, physical, threads).cores
    assert [set(cores_of_rank(cores, rank, num_ranks)) for rank in range(num_ranks)] == expected


def environment(rank: int, num_ranks: int, **more: str) -> dict[str, str]:
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks), **more}


BIG = machine(2, 8, 2)  # 32 logical cores
UNBOUND: Any = None


@pytest.mark.parametrize(
    ("given", "where", "share", "expected"),
    [
        (BIG, environment(0, 1), 0.8, (25, UNBOUND)),  # alone
        (BIG, environment(1, 2), 0.8, (12, {*range(8, 16), *range(24, 32)})),
        (BIG, environment(0, 1), None, (30, UNBOUND)),  # two are left free
        (BIG, environment(1, 8), None, (3, {2, 3, 18, 19})),  # 80 % of few
        (BIG, environment(3, 4), 1.0, (8, {*range(12, 16), *range(28, 32)})),
        (BIG, environment(0, 2, OMP_NUM_THREADS="9"), 0.8, (25, UNBOUND)),  # 32 are given below
        (BIG, environment(0, 2, OMP_PROC_BIND="true"), 0.8, (25, UNBOUND)),
        (
            BIG,
            environment(0, 2, OMP_NUM_THREADS="16", XDS_DEFAULT_THREADS="1"),
            0.8,
            (12, {*range(8), *range(16, 24)}),
        ),
        (Machine(BIG.cores[:8], 32), environment(0, 2), 0.5, (16, UNBOUND)),  # bound outside
        (machine(2, 8, 2, 8.0), environment(0, 2), 1.0, (4, {*range(8), *range(16, 24)})),
        (machine(2, 8, 2, 0.5), environment(0, 1), 1.0, (1, UNBOUND)),
        (BIG, environment(2, 2), 1.0, (32, UNBOUND)),  # wrong variables
        (machine(1, 2, 1), environment(0, 4), 1.0, (32, UNBOUND)),  # more ranks than cores
    ],
)
def test_choices(
    given: Machine, where: dict[str, str], share: float | None, expected: tuple[int, Any]
) -> None:
    num_threads, cores = expected
    wanted = Choice(num_threads, None if cores is None else frozenset(cores))
    assert choose(given, where, share, 32) == wanted


def test_what_the_kernel_says(tmp_path: Path) -> None:
    assert read_list("0-2,8,10-11\n") == [0, 1, 2, 8, 10, 11]
    assert read_list("") == []
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    assert read_quota(tmp_path) is None
    (group / "cpu.max").write_text("max 100000\n")
    assert read_quota(tmp_path) is None
    (group.parent / "cpu.max").write_text("250000 100000\n")
    assert read_quota(tmp_path) == 2.5
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/c\n")
    old = tmp_path / "sys/fs/cgroup/cpu,cpuacct/c"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert read_quota(tmp_path) is None
    (old / "cpu.cfs_quota_us").write_text("150000\n")
    assert read_quota(tmp_path) == 1.5
    usable = sorted(os.sched_getaffinity(0))
    node = tmp_path / "sys/devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text(f"{usable[-1]}\n")
    (siblings := tmp_path / f"sys/devices/system/cpu/cpu{usable[-1]}/topology").mkdir(parents=True)
    (siblings / "thread_siblings_list").write_text(f"{usable[0]},{usable[-1]}\n")
    cores = {core.number: core for core in this_machine(tmp_path).cores}
    assert list(cores) and set(cores) == set(usable)
    assert cores[usable[-1]] == Core(1, usable[0], usable[-1])


# -- real threads -------------------------------------------------------------------------------------------


def affinities() -> dict[str, Any]:
    rank = dist.get_rank()
    for name in ("OMP_NUM_THREADS", "XDS_DEFAULT_THREADS"):
        os.environ.pop(name, None)
    os.environ |= environment(rank, dist.get_world_size())
    torch.set_num_threads(2)
    found: dict[str, Any] = {}
    zero = {"offload_optimizer": {"device": "cpu"}}
    engine = xds.initialize(torch.nn.Linear(4, 4), config(2, samples=1, zero=zero))
    host = engine._parts.sharded.stores.host
    assert host is not None

    def look(name: str) -> None:
        found[name] = (sorted(os.sched_getaffinity(0)), torch.get_num_threads())

    host.queues.updates.run(lambda: look("updates")).wait()
    host.queues.to_host.run(lambda: look("copies")).wait()
    (thread := threading.Thread(target=look, args=("new thread",))).start()
    thread.join()
    look("main")
    engine.destroy()
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_only_the_thread_of_updates_is_bound() -> None:
    every = sorted(os.sched_getaffinity(0))
    found = run_new_ranks(affinities, 2)
    bound = [one["updates"][0] for one in found]
    if len(every) == os.cpu_count():
        assert sorted(bound[0] + bound[1]) == every and all(bound)
        threads = max(1, int(0.8 * len(bound[0])))
        assert found[0]["updates"][1] == threads
    for one in found:
        for name in ("copies", "new thread", "main"):
            assert one[name] == (every, 2), name


def test_without_the_right_to_bind() -> None:
    queue, before = ThreadQueue("test"), sorted(os.sched_getaffinity(0))
    two = Machine(tuple(Core(0, at, at) for at in range(2)), 2)
    refused = mock.Mock(side_effect=PermissionError("not allowed"))
    with (
        mock.patch("xds.offload.cores.this_machine", return_value=two),
        mock.patch.dict(os.environ, environment(0, 2)),
        mock.patch.object(os, "sched_setaffinity", refused),
    ):
        os.environ.pop("OMP_NUM_THREADS", None)
        place_updates(queue, 1.0)
    assert refused.called and sorted(os.sched_getaffinity(0)) == before
    queue.close()


# -- the same bits ------------------------------------------------------------------------------------------

WIDTH = 331  # 109,561 weights: several pieces of 32 Ki elements, the last one odd


def trained(optimizer: str, precision: str, share: float, num_threads: int) -> list[torch.Tensor]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    zero = {"offload_optimizer": {"device": "cpu", "cpuadam_cores_perc": share}}
    settings = config(2, precision, accumulation=2, clip=0.1, optimizer=optimizer, zero=zero)
    torch.set_num_threads(num_threads)  # of the updates; forward and backward use one below
    engine = xds.initialize(torch.nn.Linear(WIDTH, WIDTH), settings)
    torch.set_num_threads(1)
    host = engine._parts.sharded.stores.host
    assert host is not None
    used: list[int] = []
    host.queues.updates.run(lambda: used.append(torch.get_num_threads())).wait()
    assert used == [int(share * num_threads)]
    batch = torch.randn(2, WIDTH, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    for _ in range(6):
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    values = [*engine.full_state_dict(full_precision=True).values()]
    engine.destroy()
    torch.set_num_threads(before)
    return values


@pytest.mark.parametrize(
    ("optimizer", "precision"), [("AdamW", "bf16"), ("Lion", "fp32"), ("SGD", "bf16")]
)
def test_bits_do_not_depend_on_the_number_of_threads(optimizer: str, precision: str) -> None:
    one = trained(optimizer, precision, 1.0, 1)
    for num_threads, share in ((3, 1.0), (8, 0.5)):
        other = trained(optimizer, precision, share, num_threads)
        assert all(map(torch.equal, one, other)), num_threads
