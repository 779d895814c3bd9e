"""`xds bench comm --compression`: every scheme sends what its formula says, and a sentence says which pays."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import run_ranks
from real_hosts import Hosts, why_not

from xds.launcher.comm_bench import compressed, schemes, start
from xds.launcher.comm_bench.cases import RankContext
from xds.launcher.comm_bench.compressed import Result, sentence
from xds.launcher.comm_bench.plan import Plan
from xds.launcher.comm_bench.schemes import SCHEMES, Exchanges, Scheme
from xds.ops.comm.opening import open_collectives
from xds.utils.errors import XdsError

COMMAND = [sys.executable, "-m", "xds.launcher.cli", "bench", "comm", "--compression"]
PART = {  # bytes that stand for 2048 elements: (gradients, what comes back), or both
    "exact, bfloat16": 2048 * 2,
    "one bit, stage 0": 2048 // 8 + 2 * 4,
    "one bit, stages 1, 2": 2048 // 8 + 2 * 4,
    "ZeRO++, int4 and int8": (2048 // 2 + 8 * 4, 2048 + 8 * 4),
}


def results_on_a_rank(text, dtype="float32"):
    import torch.distributed as dist

    plan = Plan.from_text(text)
    collectives = open_collectives(dist.group.WORLD, torch.device("cpu"))
    context = RankContext(collectives, dist.group.WORLD, getattr(torch, dtype))
    return list(compressed.results_of(context, plan, plan.max_bytes))


def check_bytes(found, world_size, itemsize):
    expected = {
        name: size if isinstance(size, tuple) else (size, size) for name, size in PART.items()
    }
    expected["exact"] = (2048 * itemsize, 2048 * itemsize)
    if itemsize == 2:
        del expected["exact, bfloat16"]
    for at, sent in enumerate(("reduce_bytes", "gather_bytes")):
        peers = world_size - 1
        sizes = {name: peers * size[at] for name, size in expected.items()}
        assert {one.scheme: getattr(one, sent) for one in found} == sizes
    assert [one.is_exact for one in found] == [one.pack_seconds is None for one in found]
    exact = found[0]
    for one in found:
        assert one.reduce_seconds > 0 and one.gather_seconds > 0
        assert one.speed_up == exact.seconds / one.seconds
        assert one.size_bytes == world_size * 2048 * itemsize


def test_every_scheme_is_right_and_sends_what_its_formula_says():
    size = 2 * 2048 * 4
    plan = Plan(min_bytes=size, max_bytes=size, trials=1, compares=True)
    first, second = run_ranks(results_on_a_rank, 2, plan.as_text())
    assert [found[0].size_bytes for found in first] == [size]
    check_bytes(first[0], 2, 4)
    assert [one.speed_up for one in first[0]] == [one.speed_up for one in second[0]]


@pytest.mark.slow
@pytest.mark.parametrize("world_size, dtype", [(3, "float32"), (4, "bfloat16"), (2, "float16")])
def test_other_groups_and_dtypes(world_size, dtype):
    itemsize = getattr(torch, dtype).itemsize
    size = world_size * 2048 * itemsize
    plan = Plan(min_bytes=size, max_bytes=size, trials=1, compares=True)
    found = run_ranks(results_on_a_rank, world_size, plan.as_text(), dtype)[0]
    if dtype == "float16":
        assert "exact, bfloat16" not in [one.scheme for one in found[0]]
    check_bytes(found[0], world_size, itemsize)


def swapped(collectives, buffer):
    def reduce(flat, out):
        out.copy_(collectives.shard_of(flat))  # without what the others have

    return Exchanges(reduce, lambda own, flat: None)


def wrong_on_a_rank():
    schemes.SCHEMES, kept = (Scheme("broken", swapped),), SCHEMES
    try:
        return results_on_a_rank(Plan(max_bytes=1 << 14, trials=1).as_text())
    except XdsError as error:
        return str(error)
    finally:
        schemes.SCHEMES = kept


def test_a_wrong_sum_is_an_error():
    assert all(
        told.startswith("reduce of broken, 8 KiB: a wrong result on rank 0")
        for told in run_ranks(wrong_on_a_rank, 2)
    )


def result(scheme, seconds, speed_up, pack=None):
    return Result(scheme, pack is None, 1 << 20, seconds / 2, seconds / 2, 1, 1, pack, speed_up)


def test_the_sentence_names_what_pays_or_says_that_nothing_does():
    exact, half = result("exact", 1.0, 1.0), result("exact, bfloat16", 0.5, 2.0)
    bit, whole = result("one bit", 0.125, 8.0, 0.0625), result("int8", 0.5, 2.0, 0.1)
    slow = result("int4", 2.0, 0.5, 1.5)
    assert sentence([exact, half, whole, bit, slow]) == (
        "1 MiB: one bit pays most, 8.0x as fast: 125 ms instead of 1 s, 62.5 ms of it for packing; these pay "
        "as well: int8 2.0x"
    )
    assert sentence([exact, half, slow]) == (
        "1 MiB: no scheme pays: the fastest, int4, takes 2 s instead of 1 s, 1.5 s of it for packing"
    )


def test_one_rank_has_nothing_to_compress():
    assert run_ranks(results_on_a_rank, 1, Plan(max_bytes=1 << 14).as_text()) == [[]]


def test_sizes_have_a_default_of_their_own():
    plan, _ = start.read(["--compression"])
    assert (plan.min_bytes, plan.max_bytes, plan.compares) == (64 << 10, 16 << 20, True)
    plan, _ = start.read(["--compression", "--min-size", "64MiB"])
    assert (plan.min_bytes, plan.max_bytes) == (64 << 20, 64 << 20)
    plan, _ = start.read([])
    assert (plan.min_bytes, plan.max_bytes, plan.compares) == (1024, 0, False)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_command_prints_a_sentence_for_each_size(num_ranks):
    words = [*COMMAND, "--nproc-per-node", str(num_ranks), "--backend", "gloo"]
    words += ["--max-size", "256KiB", "--trials", "1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    if num_ranks == 1:
        assert lines[-1] == "one rank sends nothing: no scheme pays"
        return
    told = [line for line in lines if ": no scheme pays: " in line or " pays most, " in line]
    assert [line.split(": ")[0] for line in told] == ["64 KiB", "256 KiB"]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not(False)), reason=why_not(False) or "hosts can be made")
def test_schemes_are_compared_over_a_slow_link(tmp_path):
    with Hosts(2, has_ssh=False) as hosts:
        for name in hosts.names:
            reason = hosts.limit(name, 50)
            if reason:
                pytest.skip(reason)
        text = Plan(
            min_bytes=4 << 20, max_bytes=4 << 20, trials=1, is_json=True, compares=True
        ).as_text()
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts.address("host0"), "MASTER_PORT": "29400"}
        env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        env |= {"XDS_BACKEND": "gloo", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "xds.launcher.comm_bench.ranks", text]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [
            hosts.popen(words, {**env, "RANK": str(rank)}, place=name, cwd=tmp_path, **pipes)
            for rank, name in enumerate(hosts.names)
        ]
        (out, err), _ = [process.communicate(timeout=240) for process in started]
        assert started[0].returncode == 0, err
        told = json.loads(out)
    assert told["num_hosts"] == 2
    assert told["sentences"][0].startswith("4 MiB: ")
    bits = {row["scheme"]: row for row in told["rows"]}["one bit, stages 1, 2"]
    assert bits["reduce_bytes"] == bits["gather_bytes"] == (1 << 19) // 8 + (1 << 19) // 256
