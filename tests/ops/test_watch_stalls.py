"""Tests of ranks that stop, sleep, skip a collective or have another model: every rank reports them."""

from __future__ import annotations

import json
import multiprocessing as mp
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import stalled_runs
from helpers import run_new_ranks

from xds.ops.watch.diagnosis import GONE

TIMEOUT_SECONDS = 3.0
END_SECONDS = 20.0  # far more than the timeout and 5 s: test machines are busy

# All wait for the same timeout, so they run at once: name -> (function, ranks, stage, gets a folder).
RUNS: dict[str, tuple[Callable[..., Any], int, int, bool]] = {
    "stopped": (stalled_runs.stop_a_rank, 2, 3, True),
    "stopped, 3 ranks": (stalled_runs.stop_a_rank, 3, 2, True),
    "in its data": (stalled_runs.sleep_in_the_loader, 3, 3, True),
    "save left out": (stalled_runs.skip_a_save, 2, 2, False),
    "access left out": (stalled_runs.skip_an_access, 2, 3, False),
    "own collective": (stalled_runs.skip_own_collective, 2, 3, False),
    "late": (stalled_runs.wait_and_go_on, 2, 3, False),
    "quiet": (stalled_runs.sleep_quietly, 2, 3, False),
}
Runs = dict[str, "Future[list[dict[str, Any]]]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[Runs]:
    with ThreadPoolExecutor(len(RUNS)) as threads:
        futures: Runs = {}
        for name, (function, world_size, stage, has_folder) in RUNS.items():
            args: list[Any] = [stage]
            if has_folder:
                (folder / name).mkdir()
                args.append(str(folder / name))
            futures[name] = threads.submit(
                run_new_ranks, function, world_size, *args, timeout_seconds=TIMEOUT_SECONDS
            )
        yield futures


def said(runs: Runs, name: str, rank: int = 0) -> str:
    found = runs[name].result()[rank]
    assert found["error"].startswith("PeerError: "), found
    return str(found["error"])


@pytest.mark.slow
def test_a_stopped_rank_is_named_by_all_others(runs: Runs, folder: Path) -> None:
    for name, others in (("stopped", (0,)), ("stopped, 3 ranks", (0, 2))):
        for rank in others:
            text = said(runs, name, rank)
            assert re.search(r"rank 1 did not report: no heartbeat for \d+ s", text), text
            assert "unit 'blocks.2', for the 3rd time" in text or "the root unit" in text
            assert "tests/stalled_runs.py:" in text and "Look at the log of rank 1" in text


@pytest.mark.slow
def test_every_rank_keeps_its_collectives_in_a_file(runs: Runs, folder: Path) -> None:
    said(runs, "in its data")
    for rank in range(3):
        path = folder / "in its data" / f"rank{rank}.collectives.json"
        kept = json.loads(path.read_text())
        assert (kept["rank"], kept["world_size"]) == (rank, 3)
        last = kept["collectives"][-1]
        assert last["collective"].partition(" of ")[0] in (
            "all_gather",
            "reduce_scatter",
            "exchange",
        )
        assert last["bytes"] > 0 and last["dtype"] and last["serial"] >= last["number"]
        assert last["script"].startswith("tests/stalled_runs.py:")


def test_a_rank_in_its_data_says_where(runs: Runs) -> None:
    for rank in (0, 2):
        text = said(runs, "in its data", rank)
        assert (
            "ranks 0, 2 wait in all_gather of the root unit, for the 2nd time, which rank 1 "
            in text
        )
        assert "rank 1 waits in no collective: the script is at tests/stalled_runs.py:" in text
        assert " in next_batch. Look at this line of rank 1: every rank must run" in text


def test_a_save_that_a_rank_leaves_out_is_named(runs: Runs) -> None:
    for rank in (0, 1):
        text = said(runs, "save left out", rank)
        assert "rank 0 waits in exchange of save_checkpoint" in text
        assert "rank 1 waits in reduce_scatter of unit 'blocks.2', for the 2nd time" in text
        assert "rank 0 called it at tests/stalled_runs.py:" in text


def test_an_access_that_a_rank_leaves_out_is_named(runs: Runs) -> None:
    for rank in (0, 1):
        text = said(runs, "access left out", rank)
        assert "rank 0 waits in access of get_full_param(blocks.0.inner.weight)" in text
        assert "rank 1 waits in all_gather of the root unit, for the 2nd time" in text
        assert "Access to parameters is collective" in text


def test_a_collective_of_the_script_that_a_rank_leaves_out_is_named(runs: Runs) -> None:
    where = "rank 0 waits in torch.distributed.all_reduce of float32[3], called at tests/stalled_runs.py:"
    assert where in said(runs, "own collective", 1)
    first, second = runs["own collective"].result()
    # torch's own error; the watcher has logged before it
    assert first["error"].startswith("RuntimeError: ")
    assert len(first["lines"]) == 1 and where in first["lines"][0]
    assert "and the script's own collectives" in first["lines"][0]
    assert second["lines"] == []


def test_ranks_that_idle_and_wait_for_nobody_hear_nothing(runs: Runs) -> None:
    for found in runs["quiet"].result():
        assert (found["error"], found["lines"]) == ("", [])


def test_a_rank_that_waits_long_logs_for_whom(runs: Runs) -> None:
    first, second = runs["late"].result()
    assert (first["error"], second["error"], second["lines"]) == ("", "", [])
    (line,) = first["lines"]
    assert re.match(r"xds: waiting for [0-9]+ s \(at most [0-9]+ s more\): rank 0 waits in", line)
    assert "rank 1 waits in no collective: the script is at tests/stalled_runs.py:" in line


@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("late", "quiet")])
def test_every_rank_ends_soon_after_the_timeout(name: str, runs: Runs) -> None:
    for rank, found in enumerate(runs[name].result()):
        if rank != 1:  # that one waited for the others' end
            assert found["seconds"] < END_SECONDS, (rank, found)


def test_units_in_another_order_are_named() -> None:
    one, two = "all_gather of unit 'blocks.0'", "all_gather of unit 'blocks.1'"
    for found in run_new_ranks(stalled_runs.swap_blocks, 2, timeout_seconds=TIMEOUT_SECONDS):
        assert (
            f"rank 0 waits in {one}, for the 1st time, which rank 1 never started" in found["error"]
        )
        assert (
            f"rank 1 waits in {two}, for the 1st time, which rank 0 never started" in found["error"]
        )
        assert "the 2nd all_gather is the first that differs" in found["error"]


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_with_other_shapes_are_refused_by_name(stage: int) -> None:
    for found in run_new_ranks(stalled_runs.other_shapes, 2, stage):
        assert found["error"] == (
            "UsageError: rank 1 has another model than rank 0: parameter 1.weight float32[7, 8] on rank 1, "
            "parameter 1.weight float32[4, 8] on rank 0; build the same model, with the same config, on every "
            "rank"
        )


@pytest.mark.slow
def test_a_wait_that_cannot_raise_ends_its_process_and_tells_the_launcher(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 died with exit code 1"):
        run_new_ranks(stalled_runs.never_raise, 2, str(tmp_path), timeout_seconds=TIMEOUT_SECONDS)
    record = json.loads((tmp_path / "error1.json").read_text())
    assert record["xds"]["exit_code"] == 1 and record["message"]["extraInfo"]["timestamp"]
    text = record["message"]["message"]
    assert "did not end on rank 1 of 2 within 3 s, and cannot raise" in text
    assert "rank 0 waits in no collective: the script is at tests/stalled_runs.py:" in text
    assert record["xds"]["text"] == f"{text}\n"


def over_tcp(function: Callable[..., Any], world_size: int, *args: Any) -> list[tuple[Any, Any]]:
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


@pytest.mark.slow
def test_a_store_over_tcp_is_asked_through_a_connection_of_its_own(tmp_path: Path) -> None:
    ranks = over_tcp(stalled_runs.over_tcp, 2, str(tmp_path))
    first, second = (here.recv() for _, here in ranks)
    for process, _ in ranks:
        process.join()
        assert process.exitcode == 0
    assert first["error"].startswith("PeerError: ") and second["error"] == ""
    assert (
        "rank 1 waits in no collective: the script is at tests/stalled_runs.py:" in first["error"]
    )
    kept = json.loads((tmp_path / "rank1.collectives.json").read_text())
    assert kept["script_collectives"][-1][1:] == ["all_reduce", "[[2, 3]]"]
    assert "xds-watch" not in [*first["threads"], *second["threads"]]


def test_a_rank_that_ends_while_a_group_is_made_is_named_long_before_the_timeout() -> None:
    ranks = over_tcp(stalled_runs.lose_a_rank_in_new_group, 4)
    try:
        for _, here in ranks[:3]:
            assert here.poll(END_SECONDS * 3), "the timeout is ten minutes"
            text = here.recv()["error"]
            assert text.startswith("PeerError: new_group of ranks 0, 1, 2, 3 failed on rank "), text
            assert f"rank 3 did not report: {GONE}" in text
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
