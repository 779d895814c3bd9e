"""`xds bench comm`: every collective is checked, then timed; bandwidths are those of nccl-tests."""

import os
import socket
import subprocess
import sys
import threading

import pytest
import torch
from helpers import run_ranks

from xds.launcher import cli
from xds.launcher.comm_bench import link, ranks, start
from xds.launcher.comm_bench.cases import CASES, Case, Pattern, RankContext
from xds.launcher.comm_bench.plan import (
    MESSAGES,
    OPS,
    Baseline,
    Link,
    Plan,
    Timing,
    binary,
    bus_factor,
    row,
    row_text,
    sizes,
    time_text,
)
from xds.launcher.comm_bench.sharing import Sharing, contexts_of, copies_of, open_sharing
from xds.ops.comm.opening import open_collectives
from xds.utils.errors import UsageError, XdsError


@pytest.mark.parametrize(
    "op, factor",
    [
        ("all_reduce", 2 * 3 / 4),
        ("all_gather", 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_to_all", 3 / 4),
        ("gather", 3 / 4),
        ("scatter", 3 / 4),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("send_recv", 1.0),
        ("barrier", 0.0),
    ],
)
def test_bus_bandwidth_is_as_nccl_tests_reckons_it(op, factor):
    assert bus_factor(op, 4) == factor and bus_factor(op, 1) == 0.0


def test_a_row_compares_with_what_the_link_alone_would_take():
    where = Baseline(4, Link("wire", 1e9, 1e-6))
    large = row("all_reduce", "xds", 10**9, Timing(3.0, 5, 1.5, 2.0), where)
    assert large.bus_bytes_per_second == 5e8
    assert large.of_link == pytest.approx(0.5, rel=1e-5)  # that is busbw over the link's speed
    small = row("all_reduce", "xds", 0, Timing(4e-6, 5), where)
    assert small.of_link == pytest.approx(0.25)  # and latency over latency
    assert row("all_reduce", "xds", 8, Timing(1.0, 1), Baseline(4, None)).of_link is None
    assert row_text(large).split() == [
        *("all_reduce", "xds", "953.7", "MiB", "3", "s", "0.333", "0.500", "0.50", "2.00")
    ]


def test_a_slow_link_is_shown_in_its_own_unit():
    assert str(Link("wire", 11.9e6)) == "wire: 11.9 MB/s"
    assert str(Link("wire", 3.271e9, 1e-5)) == "wire: 3.27 GB/s, 10 us one way"


def test_sizes_grow_fourfold_and_end_where_they_are_told_to():
    assert sizes(1024, 65536) == [1024, 4096, 16384, 65536]
    assert sizes(1024, 5000) == [1024, 4096, 5000] and sizes(8, 8) == [8]
    assert (binary(1536), binary(1 << 30), binary(0)) == ("1.5 KiB", "1 GiB", "0 B")
    assert [time_text(t) for t in (2.5, 0.0025, 2.5e-6)] == ["2.5 s", "2.5 ms", "2.5 us"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_a_wrong_result_is_seen(dtype):
    """Parts that are swapped, a part twice, a rank that is missing in a sum or counts twice."""
    expected, size = Pattern(range(4)), 4
    good = torch.empty(4 * 50, dtype=dtype)
    expected.fill(good)
    parts = list(good.chunk(4))
    assert expected.is_in(good)
    for order in ([1, 0, 2, 3], [0, 0, 2, 3], [3, 1, 2, 0]):
        assert not expected.is_in(torch.cat([parts[index] for index in order]))
    summands = [torch.empty_like(good) for _ in range(size)]
    for rank, summand in enumerate(summands):
        Pattern(range(size), rank, size).fill(summand)
    assert torch.equal(sum(summands), good)
    for rank in range(size):
        assert not expected.is_in(good - summands[rank])
        assert not expected.is_in(good + summands[rank])


def rows_on_a_rank(text):
    import torch.distributed as dist

    plan = Plan.from_text(text)
    collectives = open_collectives(dist.group.WORLD, torch.device("cpu"))
    context = RankContext(collectives, dist.group.WORLD, getattr(torch, plan.dtype))
    found = link.measure(collectives, dist.group.WORLD)
    return found, list(ranks.rows_of(context, plan, found, open_sharing(context)))


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(3, "bfloat16"), pytest.param(2, "float32", marks=pytest.mark.slow)]
)
def test_every_collective_is_right_and_timed(world_size, dtype, monkeypatch):
    monkeypatch.setattr(link, "_ROUND_SECONDS", 0.05)
    plan = Plan(max_bytes=4096, min_bytes=1024, dtype=dtype, trials=2, seconds=0.01)
    answers = run_ranks(rows_on_a_rank, world_size, plan.as_text())
    links = {(found.bytes_per_second, found.latency_seconds) for found, _ in answers}
    assert len(links) == 1 and min(links.pop()) > 0  # every rank compares with the same
    found, rows = answers[0]
    assert found.what.startswith("TCP over ")
    asked = {(op, by) for op in CASES for by in CASES[op]}
    of_messages = {(op, MESSAGES) for op, by in asked if by == "xds"}
    of_messages -= {("broadcast", MESSAGES), ("barrier", MESSAGES)}  # gloo's own, as by torch
    of_messages |= {("broadcast", "torch"), ("barrier", "torch")}
    assert {(one.op, one.by) for one in rows} == asked | of_messages
    for one in rows:
        assert (one.over_copy is None) == (one.op == "barrier")
        assert one.seconds > 0 and one.of_link > 0
        assert one.size_bytes % world_size == 0
        assert 4096 - one.size_bytes < 4 * world_size or one.size_bytes <= 1024
    assert [one.seconds for one in answers[1][1]] == [one.seconds for one in rows]


ALONE = Sharing(0, "of a test")


def broken_on_a_rank(kind):
    import torch.distributed as dist

    collectives = open_collectives(dist.group.WORLD, torch.device("cpu"))
    context = RankContext(collectives, dist.group.WORLD, torch.float32)

    def make(context, numel):
        def call():
            if kind == "missing" or (kind == "failing" and context.rank == 1):
                raise RuntimeError("not supported here")

        return Case(lambda: None, call, lambda: kind != "wrong" or context.rank != 1)

    CASES["all_reduce"] = {"xds": make}
    try:
        return list(ranks.rows_of(context, Plan(("all_reduce",), max_bytes=1024), None, ALONE))
    except XdsError as error:
        return str(error)


@pytest.mark.parametrize(
    "kind, told",
    [
        ("wrong", "all_reduce by xds, 1 KiB: a wrong result on rank 1 of 2"),
        ("failing", "all_reduce by xds, 1 KiB: failed on rank 1"),
    ],
)
def test_a_wrong_sum_is_an_error_on_every_rank(kind, told):
    assert all(answer.startswith(told) for answer in run_ranks(broken_on_a_rank, 2, kind))


def test_what_a_backend_has_not_got_is_left_out():
    assert run_ranks(broken_on_a_rank, 2, "missing") == [[], []]


def test_one_rank_has_no_link_and_no_bus():
    ((found, rows),) = run_ranks(rows_on_a_rank, 1, Plan(max_bytes=1024, trials=1).as_text())
    assert found is None and {one.op for one in rows} == set(OPS) - {"send_recv"}
    assert all(one.bus_bytes_per_second == 0 and one.of_link is None for one in rows)


def ways_on_a_rank(opens):
    """What each way of a row allocates from, and what is said, where segments can be opened or not."""
    import torch.distributed as dist

    from xds.ops.comm.memory import peers
    from xds.ops.comm.memory.segment import NoSegment, segment

    def none():
        raise NoSegment("/dev/shm has 64 MiB free")

    own, device = segment(), torch.device("cpu")
    if not opens:
        peers.segment = none
    try:
        collectives = open_collectives(dist.group.WORLD, device)
        context = RankContext(collectives, dist.group.WORLD, torch.float32)
        sharing = open_sharing(context)
    finally:
        peers.segment = segment
    context_of = contexts_of(context, sharing)
    first, last = own._data, own._data + own.size_bytes
    is_shared = [first <= context_of(by).empty(1 << 16).data_ptr() < last for by in BY]
    copies = copies_of(context, sharing, 1024)
    return str(sharing), sharing.facts(), is_shared, copies(1024) is not None, copies(0)


BY = ("xds", MESSAGES, "torch")


def test_only_rows_of_shared_memory_have_buffers_in_it():
    for told, facts, is_shared, has_copy, no_copy in run_ranks(ways_on_a_rank, 2, True):
        assert told == facts["shared_memory"] == "used, ranks read each other's buffers"
        assert facts["shares_memory"] and is_shared == [True, False, False]
        assert has_copy and no_copy is None


def test_the_heading_says_why_no_memory_is_shared():
    ranks = run_ranks(ways_on_a_rank, 2, False)
    assert [told for told, *_ in ranks] == [
        "not used, /dev/shm has 64 MiB free",
        "not used, another rank's log says why",
    ]
    for told, facts, is_shared, has_copy, _ in ranks:
        assert facts == {"shares_memory": False, "shared_memory": told}
        assert is_shared == [False] * 3 and not has_copy


def test_messages_between_hosts_are_not_compared_with_a_copy():
    assert str(Sharing(2)) == "used inside each of 2 hosts, messages between them"
    assert copies_of(None, Sharing(2), 1024)(1024) is None


def test_the_link_is_a_bare_connection(monkeypatch):
    monkeypatch.setattr(link, "_ROUND_SECONDS", 0.02)
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=link.send, args=(NoDelay(there),))
        sender.start()
        found = link.receive(NoDelay(here), "pair")
        sender.join(20)
        assert not sender.is_alive()
    assert found.bytes_per_second > 0 and found.latency_seconds > 0


class NoDelay:
    """A socket without TCP's options."""

    def __init__(self, inner):
        self._inner = inner

    def setsockopt(self, *_):
        pass

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_a_link_that_breaks_off_is_an_error_and_not_a_hang():
    here, there = socket.socketpair()
    there.close()
    with here, pytest.raises(OSError):
        link.receive(NoDelay(here), "pair")


def test_sizes_end_where_memory_does(monkeypatch, capsys):
    collectives = open_collectives(None, torch.device("cpu"))
    context = RankContext(collectives, None, torch.float32)
    monkeypatch.setattr(ranks, "_free_bytes", lambda context: 1 << 20)
    assert ranks._largest(context, Plan(max_bytes=1 << 30)) == 1 << 16
    assert "sizes end at 64 KiB" in capsys.readouterr().err
    assert ranks._largest(context, Plan(max_bytes=4096)) == 4096


def test_its_own_words_are_taken_out_and_the_rest_is_the_launchers():
    words = ["--hostfile", "hosts", "--op", "all_gather,barrier", "--max-size=1MiB", "-i", "a:0"]
    plan, rest = start.read([*words, "--json", "--trials", "3"])
    assert rest == ["--hostfile", "hosts", "-i", "a:0"]
    assert plan == Plan(("all_gather", "barrier"), 1024, 1 << 20, "float32", 3, 0.5, True)
    assert Plan.from_text(plan.as_text()) == plan


@pytest.mark.parametrize(
    "words, told",
    [
        (["--op", "all_reduc"], "--op = all_reduc"),
        (["--max-size", "large"], "--max-size = large"),
        (["--min-size", "1MiB", "--max-size", "1KiB"], "is below --min-size"),
        (["--trials", "0"], "--trials = 0"),
        (["--dtype", "float64"], "--dtype"),
        (["--seconds", "0"], "--seconds = 0"),
        (["--compression", "--op", "barrier"], "--op = barrier with --compression"),
        (["--compression", "--dtype", "int8"], "--dtype = int8 with --compression"),
    ],
)
def test_wrong_use_is_told(words, told):
    with pytest.raises(UsageError) as caught:
        start.read(words)
    assert told in str(caught.value)


def test_unknown_words_are_refused_by_the_launcher(capsys):
    assert cli.main(["bench", "comm", "--no-such-thing"]) == 2
    assert "--no-such-thing" in capsys.readouterr().err
    assert cli.main(["bench", "disk"]) == 2
    assert "the only one is comm" in capsys.readouterr().err
    assert cli.main(["bench"]) == 2


@pytest.mark.slow
def test_the_command_starts_ranks_and_prints_a_table():
    words = [sys.executable, "-m", "xds.launcher.cli", "bench", "comm", "--nproc-per-node", "2"]
    words += ["--backend", "gloo", "--op", "all_gather", "--max-size", "1KiB", "--trials", "1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("2 ranks, gloo, 1 host: ") and "TCP over lo" in lines[1]
    assert lines[2].startswith("shared memory: used")
    assert [line.split()[:2] for line in lines[5:]] == [
        ["all_gather", by] for by in ("xds", MESSAGES, "torch")
    ]
