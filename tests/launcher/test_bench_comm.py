"""`xds bench comm`: every collective is checked, then timed; bandwidths are those of nccl-tests."""

import json
import os

import pytest
import torch
from forked_launcher import ForkedLauncher
from helpers import run_processes

from xds.launcher import bench, cli
from xds.launcher.bench_ranks import Bench, bus_factor
from xds.ops.comm.opening import open_collectives
from xds.utils.errors import UsageError, XdsError

PLAN = bench.BenchPlan(bench.OPS, 1024, 4096, "bfloat16", 2, False)


def test_bus_bandwidth_is_as_nccl_tests_reckons_it():
    assert [bus_factor(op, 4) for op in bench.OPS] == [0.75, 0.75, 1.5, 0.75, 1.0, 1.0]
    assert {bus_factor(op, 1) for op in bench.OPS} == {0.0}


def rows_and_an_error():
    """The speed of the link, the rows, and what is said of a wrong result on rank 1."""
    import torch.distributed as dist

    collectives = open_collectives(dist.group.WORLD, torch.device("cpu"))
    found = Bench(collectives, dist.group.WORLD, PLAN)
    link = found.measure_link([0] * collectives.world_size)
    rows = list(found.rows())
    if collectives.rank == 1:
        collectives.all_gather = Damaged(collectives.all_gather)
    try:
        list(Bench(collectives, dist.group.WORLD, PLAN).rows())
    except XdsError as error:
        return link, rows, str(error)
    return link, rows, ""


class Damaged:
    """A collective whose result is wrong."""

    def __init__(self, right):
        self._right = right

    def __call__(self, flat, *args, **kwargs):
        self._flat, self._handle = flat, self._right(flat, *args, **kwargs)
        return self

    def wait(self):
        self._handle.wait()
        self._flat[0] += 1


def test_every_collective_is_right_and_timed_and_a_wrong_result_is_an_error_on_every_rank():
    answers = run_processes(rows_and_an_error, 3)
    (link, rows, _), (_, others, _) = answers[:2]
    assert link > 0 and [row.seconds for row in rows] == [row.seconds for row in others]
    assert {(row.op, row.by) for row in rows} == {
        (op, by) for op in bench.OPS for by in ("xds", "torch")
    } - {("broadcast", "torch")}
    assert {row.size_bytes for row in rows} == {1020, 4092}  # whole elements on each of 3 ranks
    for row in rows:
        assert row.seconds > 0 and row.of_link > 0
        bus = row.algorithm_bytes_per_second * bus_factor(row.op, 3)
        assert row.bus_bytes_per_second == pytest.approx(bus)
    for *_, told in answers:
        assert told.startswith("all_gather by xds, 1020 bytes: a wrong result on rank 1 of 3")


def test_one_rank_has_no_link_and_no_bus():
    ((link, rows, told),) = run_processes(rows_and_an_error, 1)
    assert link == 0 and {row.op for row in rows} == set(bench.OPS) - {"send_recv"} and not told
    assert all(row.bus_bytes_per_second == 0 and row.of_link is None for row in rows)


def test_its_own_words_are_taken_out_and_the_rest_is_the_launchers(capsys):
    words = "--hostfile hosts --op all_gather --op all_reduce --max-size=1MiB -i a:0"
    plan, rest = bench.read([*words.split(), "--json", "--trials", "3"])
    assert rest == ["--hostfile", "hosts", "-i", "a:0"]
    assert plan == bench.BenchPlan(("all_gather", "all_reduce"), 1024, 1 << 20, "float32", 3, True)
    for line, told in {
        "--op all_reduc": "--op = all_reduc",
        "--max-size large": "--max-size = large",
        "--min-size 1MiB --max-size 1KiB": "is below --min-size",
        "--trials 0": "--trials = 0",
        "--compression": "--compression: was removed",
    }.items():
        with pytest.raises(UsageError) as caught:
            bench.read(line.split())
        assert told in str(caught.value)
    for line, told in {
        "comm --no-such-thing": "--no-such-thing",
        "disk": "there are comm and machine",
    }.items():
        assert cli.main(["bench", *line.split()]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_starts_ranks_and_prints_a_table(tmp_path):
    words = (
        "bench comm --nproc-per-node 2 --backend gloo --op all_gather --max-size 1KiB --trials 1"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = ForkedLauncher([*words.split(), "--json"], tmp_path, env)
    out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, err
    told = json.loads(out)
    assert (told["world_size"], told["num_hosts"], len(told["rows"])) == (2, 1, 2)
