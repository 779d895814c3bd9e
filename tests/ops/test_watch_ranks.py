"""Ranks that stop, sleep, leave a collective out or have another model: every rank reports them."""

from __future__ import annotations

import json
import logging
import multiprocessing as mp
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from divergent_models import build, config_of, samples
from helpers import on_busy_machines, run_new_ranks

import xds
from xds.engine.process.process import join
from xds.ops.comm.collectives import ACCESS_BUFFER
from xds.ops.comm.mesh_groups import MeshGroups
from xds.ops.comm.opening import member_of, open_collectives, open_nccl
from xds.ops.mesh import Mesh
from xds.ops.watch import watcher
from xds.ops.watch.config import WatchConfig
from xds.ops.watch.diagnosis import GONE

TIMEOUT_SECONDS = on_busy_machines(3.0)
AT_ONCE = 4  # runs that wait for the same timeout
ALL = (0, 1, 2)
HERE = "tests/ops/test_watch_ranks.py:"


class Lines(logging.Handler):
    """What the watcher logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("xds").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def engine_of(stage: int, **watch: Any) -> xds.Engine:
    config = {**config_of(stage), "watch": {"heartbeat_seconds": 0.25, **watch}}
    return xds.initialize(build("early exit"), config)


def one_step(engine: xds.Engine, step: int) -> None:
    engine.backward(engine(samples(engine.global_rank, step), ALL))
    engine.step()


def outcome_of(steps: Callable[[], Any]) -> dict[str, Any]:
    """What `steps` raised, and what was logged meanwhile."""
    heard, error = Lines(), ""
    try:
        steps()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {"error": error, "lines": heard.lines}


# -- what ranks do ------------------------------------------------------------------------------------------


def stop_a_rank(folder: str) -> dict[str, Any]:
    """Rank 1 is stopped by a signal after two steps, and continues when the others have reported it."""
    engine = engine_of(3)

    def steps() -> None:
        for step in range(4):
            if engine.global_rank == 1 and step == 2:
                if os.fork() == 0:  # it wakes us when all others have spoken
                    while len(list(Path(folder).glob("said.*"))) < engine.world_size - 1:
                        time.sleep(0.05)
                    os.kill(os.getppid(), signal.SIGCONT)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGSTOP)
            one_step(engine, step)

    found = outcome_of(steps)
    Path(folder, f"said.{engine.global_rank}").touch()
    return found


def sleep_in_the_loader(folder: str) -> dict[str, Any]:
    """Rank 1's data takes longer than the timeout."""
    engine = engine_of(3)
    os.environ["XDS_DUMP_DIR"] = folder

    def next_batch(step: int) -> None:
        if engine.global_rank == 1 and step == 1:
            while not Path(folder, "said").exists():
                time.sleep(0.05)

    def steps() -> None:
        for step in range(3):
            next_batch(step)
            one_step(engine, step)

    found = outcome_of(steps)
    if engine.global_rank == 0:
        Path(folder, "said").touch()
    return found


def skip_an_access(folder: str) -> dict[str, Any]:
    """Rank 1 does not ask for the parameter."""
    engine = engine_of(3)

    def steps() -> None:
        one_step(engine, 0)
        if engine.global_rank != 1:
            xds.zero.get_full_param(next(iter(engine.module.parameters())))
        one_step(engine, 1)

    return outcome_of(steps)


def end_early(folder: str) -> dict[str, Any]:
    """Rank 1 has one batch less."""
    engine = engine_of(2)  # at stage 3 `destroy` gathers the parameters

    def steps() -> None:
        one_step(engine, 0)
        if engine.global_rank == 1:
            engine.destroy()
        else:
            one_step(engine, 1)

    return outcome_of(steps)


def skip_own_collective(folder: str) -> dict[str, Any]:
    """The script has a collective of its own, which rank 1 leaves out."""
    engine = engine_of(3)
    loss = torch.zeros(3)

    def steps() -> None:
        one_step(engine, 0)
        if engine.global_rank != 1:
            dist.all_reduce(loss)
        one_step(engine, 1)

    return outcome_of(steps)


def idle_and_be_late(folder: str) -> dict[str, Any]:
    """Both idle for longer than the timeout while no rank waits; then rank 1 is late, but not too late."""
    engine = engine_of(3, notice_seconds=0.5)

    def steps() -> None:
        one_step(engine, 0)
        time.sleep(TIMEOUT_SECONDS + 1)
        one_step(engine, 1)
        time.sleep(1.5 * engine.global_rank)
        one_step(engine, 2)

    return outcome_of(steps)


def swap_blocks(folder: str) -> dict[str, Any]:
    """Rank 1 calls the first two blocks the other way round."""
    zero = {"stage3_max_reuse_distance": 0, "overlap_comm": False}
    engine = xds.initialize(build("early exit"), config_of(3, **zero))
    route = (1, 0, 2) if engine.global_rank == 1 else ALL
    return outcome_of(lambda: engine(samples(0, 0), route))


def mix_small_gathers(folder: str) -> dict[str, Any]:
    """Ranks meet in small gathers of different sizes: gloo alone would abort the process."""
    collectives = open_collectives(dist.group.WORLD, torch.device("cpu"))
    collectives.barrier()
    if collectives.rank == 2:
        call = (torch.zeros(2), ACCESS_BUFFER, "get_full_param(w)")
        return outcome_of(lambda: collectives.gather_small(*call))
    return outcome_of(lambda: collectives.gather_small(torch.zeros(1 + 7 * collectives.rank)))


def wait_in_a_barrier_alone(folder: str) -> dict[str, Any]:
    """Rank 0 is in a barrier that rank 1 never joins."""
    group = dist.group.WORLD
    assert group is not None
    collectives, flat = open_nccl(member_of(group, torch.device("cpu"))), torch.zeros(8)
    collectives.barrier()
    if collectives.rank == 0:
        return outcome_of(collectives.barrier)
    gather = collectives.all_gather
    return outcome_of(lambda: gather(flat, flat[4:], buffer=0, kind="all_gather").wait())


RUNS: dict[Callable[[str], dict[str, Any]], int] = {
    sleep_in_the_loader: 3,
    stop_a_rank: 2,
    skip_an_access: 2,
    end_early: 2,
    skip_own_collective: 2,
    idle_and_be_late: 2,
    swap_blocks: 2,
    mix_small_gathers: 3,
    wait_in_a_barrier_alone: 2,
}
Runs = dict[Any, "Future[list[dict[str, Any]]]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[Runs]:
    """All wait for the same timeout, so they run at once."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        futures: Runs = {}
        for function, world_size in RUNS.items():
            own = folder / function.__name__
            own.mkdir()
            call = (run_new_ranks, function, world_size, str(own))
            futures[function] = threads.submit(*call, timeout_seconds=TIMEOUT_SECONDS)  # type: ignore[arg-type]
        yield futures


def said(runs: Runs, function: Any, rank: int = 0) -> str:
    found = runs[function].result()[rank]
    assert found["error"].startswith("PeerError: "), found
    return str(found["error"])


# -- what is reported ---------------------------------------------------------------------------------------


def test_a_rank_in_its_data_says_where_and_every_rank_keeps_its_collectives_in_a_file(
    runs: Runs, folder: Path
) -> None:
    for rank in (0, 2):
        text = said(runs, sleep_in_the_loader, rank)
        wait = "ranks 0, 2 wait in all_gather of the root unit, for the 2nd time, which rank 1 "
        assert wait in text
        assert f"rank 1 waits in no collective: the script is at {HERE}" in text
        assert " in next_batch. Look at this line of rank 1: every rank must run" in text
    for rank in range(3):
        path = folder / "sleep_in_the_loader" / f"rank{rank}.collectives.json"
        kept = json.loads(path.read_text())
        assert (kept["rank"], kept["world_size"]) == (rank, 3)
        last = kept["collectives"][-1]
        name = last["collective"].partition(" of ")[0]
        assert name in ("all_gather", "reduce_scatter", "exchange")
        assert last["bytes"] > 0 and last["dtype"] and last["serial"] >= last["number"]
        assert last["script"].startswith(HERE)


def test_a_stopped_rank_is_named(runs: Runs) -> None:
    text = said(runs, stop_a_rank)
    assert re.search(r"rank 1 did not report: no heartbeat for \d+ s", text), text
    assert HERE in text and "Look at the log of rank 1" in text


def test_an_access_that_a_rank_leaves_out_is_named(runs: Runs) -> None:
    for rank in (0, 1):
        text = said(runs, skip_an_access, rank)
        assert "rank 0 waits in access of get_full_param(blocks.0.inner.weight)" in text
        assert "rank 1 waits in all_gather of the root unit, for the 2nd time" in text
        assert f"rank 0 called it at {HERE}" in text
        assert "Access to parameters is collective" in text


def test_a_rank_that_has_ended_is_named_with_its_number_of_calls(runs: Runs) -> None:
    text = said(runs, end_early)
    assert ", for the 2nd time, which rank 1 started only once" in text
    assert "rank 1 has ended, or destroyed this engine" in text
    assert "Look for fewer batches, or a branch that leaves a call out, on rank 1" in text


def test_a_collective_of_the_script_that_a_rank_leaves_out_is_named(runs: Runs) -> None:
    where = f"rank 0 waits in torch.distributed.all_reduce of float32[3], called at {HERE}"
    assert where in said(runs, skip_own_collective, 1)
    first, second = runs[skip_own_collective].result()
    # torch's own error; the watcher has logged before it
    assert first["error"].startswith("RuntimeError: ")
    assert len(first["lines"]) == 1 and where in first["lines"][0]
    assert "and the script's own collectives" in first["lines"][0]
    assert second["lines"] == []


def test_ranks_may_idle_and_a_rank_that_waits_long_logs_for_whom(runs: Runs) -> None:
    first, second = runs[idle_and_be_late].result()
    assert (first["error"], second["error"]) == ("", "")
    line = first["lines"][-1]
    assert re.match(r"xds: waiting for [0-9]+ s \(at most [0-9]+ s more\): rank 0 waits in", line)
    assert f"rank 1 waits in no collective: the script is at {HERE}" in line


def test_units_in_another_order_are_named(runs: Runs) -> None:
    for rank in (0, 1):
        text = said(runs, swap_blocks, rank)
        for own, other in ((0, 1), (1, 0)):
            wait = f"rank {own} waits in all_gather of unit 'blocks.{own}', for the 1st time"
            assert f"{wait}, which rank {other} never started" in text
        assert "the 2nd all_gather is the first that differs" in text


def test_small_gathers_that_do_not_fit_and_a_barrier_that_nobody_joins_are_named(
    runs: Runs,
) -> None:
    for rank in (0, 1, 2):
        text = said(runs, mix_small_gathers, rank)
        assert "ranks 0, 1 wait in exchange of norms and flags" in text
        assert "rank 2 waits in access of get_full_param(w), for the 1st time" in text
    for rank in (0, 1):
        text = said(runs, wait_in_a_barrier_alone, rank)
        assert "rank 0 waits in barrier of all ranks, for the 2nd time" in text
        assert "rank 1 waits in all_gather of flat buffer 0" in text


# -- ranks over TCP -----------------------------------------------------------------------------------------


def start_over_tcp(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Processes that run `function`, each with the pipe on which it answers."""
    context = mp.get_context("forkserver")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=function, args=(rank, world_size, port, there, *args))
        process.start()
        there.close()
        ranks.append((process, here))
    return ranks


def _set_variables(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")


def with_a_store_of_its_own(rank: int, world_size: int, port: int, pipe: Any, folder: str) -> None:
    """A rank of its own group over a TCPStore, as launchers make it; rank 0 keeps the store."""
    _set_variables(rank, world_size, port)
    os.environ.update(XDS_TIMEOUT_SECONDS="3", XDS_DUMP_DIR=folder, TORCH_FR_BUFFER_SIZE="16")
    engine = engine_of(2)
    one_step(engine, 0)
    dist.all_reduce(torch.zeros(2, 3))  # torch's flight recorder keeps it
    found = outcome_of(lambda: rank == 1 or one_step(engine, 1))
    if rank == 1:
        time.sleep(4.5)
    engine.destroy()
    names_left = [thread.name for thread in threading.enumerate()]
    pipe.send({**found, "threads": names_left})
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_store_over_tcp_is_asked_through_a_connection_of_its_own(tmp_path: Path) -> None:
    ranks = start_over_tcp(with_a_store_of_its_own, 2, str(tmp_path))
    first, second = (here.recv() for _, here in ranks)
    for process, _ in ranks:
        process.join()
        assert process.exitcode == 0
    assert first["error"].startswith("PeerError: ") and second["error"] == ""
    assert f"rank 1 waits in no collective: the script is at {HERE}" in first["error"]
    kept = json.loads((tmp_path / "rank1.collectives.json").read_text())
    assert kept["script_collectives"][-1][1:] == ["all_reduce", "[[2, 3]]"]
    assert "xds-watch" not in [*first["threads"], *second["threads"]]


def lose_a_rank_in_new_group(rank: int, world_size: int, port: int, pipe: Any) -> None:
    """The last rank's process ends when it is to join a group, which the others wait for in torch."""
    _set_variables(rank, world_size, port)
    watcher.PATIENCE_SECONDS = 1.0
    group = join(torch.device("cpu"))
    world = open_collectives(group, torch.device("cpu"))
    world.start_watching(WatchConfig(heartbeat_seconds=0.25), 600)
    groups = MeshGroups(Mesh(pipe=1, data=2, tensor=2), group, world, 600)
    groups.along("tensor")
    if rank == world_size - 1:
        dist.new_group = lambda *_, **__: os._exit(1)
    pipe.send(outcome_of(lambda: groups.along(("data", "tensor"), "all")))
    signal.pause()  # rank 0 keeps the store for the others


def test_a_rank_that_ends_while_a_group_is_made_is_named_long_before_the_timeout() -> None:
    ranks = start_over_tcp(lose_a_rank_in_new_group, 4)
    try:
        for _, here in ranks[:3]:
            assert here.poll(60), "the timeout is ten minutes"
            text = here.recv()["error"]
            assert text.startswith("PeerError: new_group of ranks 0, 1, 2, 3 failed on rank "), text
            assert f"rank 3 did not report: {GONE}" in text
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()


# -- with a launcher, and slow ranks ------------------------------------------------------------------------


def never_raise(folder: str) -> None:
    """Rank 1's main thread sits in a wait that cannot raise: its process is ended for it."""
    engine = engine_of(2)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error{engine.global_rank}.json"
    one_step(engine, 0)
    if engine.global_rank == 1:
        watch = engine._sharded.collectives.watch
        watch.begin_wait(watch.start("all_gather", 0))
    while not Path(folder, "error1.json").exists():
        time.sleep(0.1)
    time.sleep(engine.global_rank)  # a rank that ends is not to end the other one's wait


@pytest.mark.slow
def test_a_wait_that_cannot_raise_ends_its_process_and_tells_the_launcher(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 died with exit code 1"):
        run_new_ranks(never_raise, 2, str(tmp_path), timeout_seconds=TIMEOUT_SECONDS)
    record = json.loads((tmp_path / "error1.json").read_text())
    assert record["xds"]["exit_code"] == 1 and record["message"]["extraInfo"]["timestamp"]
    text = record["message"]["message"]
    limit = f"{TIMEOUT_SECONDS:.0f} s"
    assert f"did not end on rank 1 of 2 within {limit}, and cannot raise" in text
    assert f"rank 0 waits in no collective: the script is at {HERE}" in text
    assert record["xds"]["text"] == f"{text}\n"


def sleep_in_each_step() -> list[str]:
    """Rank 1 sleeps 60 ms more in each step from the tenth on."""
    heard = Lines()
    logging.getLogger("xds").setLevel(logging.INFO)
    engine = engine_of(2)
    for step in range(60):
        time.sleep(0.06 + (0.06 if engine.global_rank == 1 and step >= 10 else 0.0))
        one_step(engine, step)
    dist.barrier()
    engine.destroy()
    return [line for line in heard.lines if "slower" in line]


@pytest.mark.slow
def test_a_rank_that_sleeps_in_its_steps_is_named_by_rank_0() -> None:
    first, *others = run_new_ranks(sleep_in_each_step, 4)  # from four ranks on
    assert len(first) == 1 and first[0].startswith("xds: rank 1 (host "), first
    assert " is slower than its peers: compute 0.1" in first[0]
    assert others == [[], [], []]
