"""The orders of all hosts fit one command-line argument, and each host finds its own."""

from __future__ import annotations

import base64
import json
import os
import socket
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from xds.launcher.job import Job, Order, Rendezvous
from xds.launcher.ranks import elastic
from xds.launcher.ranks.run_folder import run_folder
from xds.launcher.remote.messages import MAX_BYTES, pack_orders, unpack_order
from xds.utils.errors import UsageError

JOB = Job("script", "a b.py", ("$(x)", "ü\n"), num_ranks="auto")


def orders(num_hosts: int, **more: object) -> list[Order]:
    return [
        Order(
            JOB,
            Rendezvous("static", "h0:29500", "ab.0", num_hosts, num_hosts, node_rank=number),
            8,
            host=f"node{number:04d}",
            environment={"NCCL_DEBUG": "INFO"},
            **more,  # type: ignore[arg-type]
        )
        for number in range(num_hosts)
    ]


def test_each_host_finds_its_order_by_its_number() -> None:
    made = orders(3, devices=(0, 2), folder="/w 'x'")
    text = pack_orders("token", made)
    assert text.isascii() and not set(text) - set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_="
    )
    for number, order in enumerate(made):
        assert unpack_order(text, number, {}) == ("token", order)


def test_a_name_that_fits_is_believed_before_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    made = orders(3)
    text = pack_orders("token", made)
    assert unpack_order(text, 0, {"SLURMD_NODENAME": "node0002"})[1] == made[2]
    assert unpack_order(text, None, {"SLURMD_NODENAME": "node0002"})[1] == made[2]
    monkeypatch.setattr(socket, "gethostname", lambda: "node0001.cluster")
    assert unpack_order(text, 0, {})[1] == made[1]
    assert unpack_order(text, 0, None)[1] == made[0], "a number that is certain, from pdsh"
    twice = [replace(order, host="node0001") for order in made]
    assert unpack_order(pack_orders("token", twice), 2, {})[1] == twice[2]


def test_the_only_host_needs_neither() -> None:
    made = orders(1)
    assert unpack_order(pack_orders("token", made), None, {}) == ("token", made[0])


def test_2048_hosts_take_a_small_part_of_an_argument() -> None:
    made = orders(2048)
    text = pack_orders("token", made)
    assert len(text) < MAX_BYTES / 4
    assert unpack_order(text, 2047, {})[1] == made[2047]


def test_what_no_argument_can_hold_is_refused_with_a_way_out() -> None:
    noise = base64.b64encode(os.urandom(150_000)).decode()
    long = [replace(orders(1)[0], environment={"A": noise})]
    with pytest.raises(UsageError, match="forward fewer variables.*--launcher ssh"):
        pack_orders("token", long)


def packed(whole: object) -> str:
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(whole).encode())).decode()


@pytest.mark.parametrize(
    "text",
    [
        *("", "%%", "AAAA", "x" * 99, pack_orders("token", orders(2))[:-8]),
        *(packed([]), packed({"token": 1, "own": []}), packed({"token": "a"}), packed("x")),
    ],
)
def test_a_text_that_is_no_orders_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="orders in the command line cannot be decoded"):
        unpack_order(text, 0, {})


def test_a_text_that_unpacks_to_too_much_is_refused() -> None:
    bomb = base64.urlsafe_b64encode(zlib.compress(b" " * (65 * 2**20), 9)).decode()
    with pytest.raises(UsageError, match="cannot be decoded"):
        unpack_order(bomb, 0, {})


def test_a_host_that_is_not_among_them_is_told() -> None:
    text = pack_orders("token", orders(2))
    with pytest.raises(UsageError, match="the index of this host is unknown"):
        unpack_order(text, None, {})
    with pytest.raises(UsageError, match="host number 2, but the orders are for 2 hosts"):
        unpack_order(text, 2, {})


def test_ranks_of_a_host_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "num_cores", lambda: 9)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for num_ranks, threads in ((1, "9"), (4, "2"), (16, "1")):
        assert elastic.common_environment(orders(1)[0], num_ranks)["OMP_NUM_THREADS"] == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the user's choice
    assert "OMP_NUM_THREADS" not in elastic.common_environment(orders(1)[0], 4)


def test_a_rank_that_is_bound_to_cores_has_a_thread_for_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(elastic.os, "sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.setenv("XDS_CACHE_DIR", str(tmp_path))
    place = dict.fromkeys(("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"), "1")
    bound = replace(orders(1)[0], job=replace(orders(1)[0].job, bind_cores=True))
    for num_ranks, cores in ((9, "8"), (3, "6,7,8")):
        envs = {rank: {"RANK": str(rank), **place} for rank in range(num_ranks)}
        with run_folder("") as folder:
            elastic.RankFiles(folder, bound, num_ranks, {}, {}).reify(envs)
        last = envs[num_ranks - 1]
        threads = str(len(cores.split(",")))
        assert (last["XDS_RANK_CORES"], last["OMP_NUM_THREADS"]) == (cores, threads)
