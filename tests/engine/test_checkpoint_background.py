"""Saving in the background: exact though training goes on, one at a time, never silently lost; keep_last."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_runs import BF16, engine_of, inputs, same, states_of, train, whole
from helpers import _context as context
from helpers import run_processes

import xds
from xds.engine.checkpoint.io import background
from xds.engine.checkpoint.io.folders import Claim, make_folder
from xds.ops.watch import Store

BACKGROUND = {"checkpoint": {"async_save": True}}


def writer_pid(engine: Any) -> int:
    pid: int = engine._parts.saver._writer._process.pid
    return pid


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Meanwhile this process does nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def tags(folder: str | Path) -> list[str]:
    """Committed tags."""
    return sorted(path.parent.name for path in Path(folder).glob("[!.]*/manifest.json"))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- what is written ----------------------------------------------------------------------------------------


def save_and_go_on(folder: str, stage: int, more: dict[str, Any]) -> Any:
    engine = engine_of(stage, **more, **BACKGROUND)
    train(engine, 0, 2)
    engine.save_checkpoint(folder, "first")
    engine.wait_for_checkpoint()  # the process is there now
    train(engine, 2, 3)
    with stopped(writer_pid(engine)):
        saved = states_of(engine)
        engine.save_checkpoint(folder, "second", {"step": 3})
        train(engine, 3, 5)
        progress = engine.checkpoint_progress()
        assert progress is not None and progress.tag == "second"
        assert progress.written_bytes < progress.total_bytes
        assert tags(folder) == ["first"]
    engine.wait_for_checkpoint()
    assert engine.checkpoint_progress() is None
    assert tags(folder) == ["first", "second"]
    engine.destroy()
    other = engine_of(stage, seed=9, **more)
    _, client_state = other.load_checkpoint(folder)
    assert client_state == {"step": 3} and other.global_steps == 3
    return saved, states_of(other)


@pytest.mark.parametrize(("stage", "more"), [(0, {}), (2, BF16), (3, {})])
def test_the_copy_is_exact_though_training_goes_on(
    tmp_path: Path, stage: int, more: dict[str, Any]
) -> None:
    saved, loaded = zip(*run_processes(save_and_go_on, 2, str(tmp_path), stage, more), strict=True)
    same(whole(list(saved)), whole(list(loaded)))


def load_while_writing(folder: str) -> None:
    engine = engine_of(1, **BACKGROUND)
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    train(engine, 1, 2)
    engine.save_checkpoint(folder)  # waits for the first
    assert tags(folder) in (["global_step1"], ["global_step1", "global_step2"])
    train(engine, 2, 3)
    engine.load_checkpoint(folder)  # waits for the second
    assert engine.global_steps == 2
    engine.destroy()


def test_saves_and_loads_wait_for_the_one_under_way(tmp_path: Path) -> None:
    run_processes(load_while_writing, 2, str(tmp_path))


# -- what goes wrong ----------------------------------------------------------------------------------------


def fail_in_each_way(folder: str) -> None:
    """One save after another fails on one rank. Every rank raises, and the next save works."""
    root, rank = Path(folder), dist.get_rank()
    engine = engine_of(2, **BACKGROUND)
    saver = engine._parts.saver
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    unlimited = (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1])

    def check(others: set[str]) -> None:
        dist.barrier()
        left = {path.name for path in root.iterdir()}
        assert left == {"latest", "global_step1", *others}
        assert (root / "latest").read_text() == "global_step1"
        dist.barrier()  # the next save begins with a folder

    def wait_fails(words: str) -> None:
        with pytest.raises(xds.XdsError, match=words):
            engine.wait_for_checkpoint()

    # the disk is full on rank 1: the next step says it, and is a step
    if rank == 1:
        resource.prlimit(writer_pid(engine), resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    engine.save_checkpoint(folder, "full")
    saver._thread.join()
    with pytest.raises(
        xds.XdsError, match="in the background: full was not saved in .*: rank 1 failed: OSError"
    ):
        train(engine, 1, 2)
    assert engine.global_steps == 2 and engine.was_step_applied()
    check(set())
    if rank == 1:
        resource.prlimit(writer_pid(engine), resource.RLIMIT_FSIZE, unlimited)

    # rank 1 has no memory for the copy
    memory = saver._writer.memory

    def refuse(size_bytes: int) -> Any:
        raise MemoryError(f"no {size_bytes} bytes")

    if rank == 1:
        saver._writer.memory = refuse
    engine.save_checkpoint(folder, "large")
    wait_fails("large was not saved in .*: rank 1 failed: MemoryError")
    saver._writer.memory = memory
    check(set())

    # all is written, and rank 0 cannot give it its name
    with stopped(writer_pid(engine)):
        engine.save_checkpoint(folder, "taken")
        dist.barrier()
        if rank == 0:
            (root / "taken").write_text("a file")
    wait_fails("taken was not saved in .*: rank 0 failed: NotADirect")
    check({"taken"})

    engine.save_checkpoint(folder)
    train(engine, 3, 4)
    engine.destroy()
    assert tags(folder) == ["global_step1", "global_step2"]
    assert (root / "latest").read_text() == "global_step2"


def killed_writer(folder: str) -> None:
    engine = engine_of(3, **BACKGROUND)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    if dist.get_rank() == 0:
        os.kill(writer_pid(engine), signal.SIGKILL)
    engine.save_checkpoint(folder, "killed")
    with pytest.raises(xds.XdsError, match=r"rank 0 failed: the process that writes .* with -9"):
        engine.wait_for_checkpoint()
    engine.save_checkpoint(folder, "again")
    engine.destroy()
    assert tags(folder) == ["again", "global_step0"]


def test_a_killed_writer_is_named_and_replaced(tmp_path: Path) -> None:
    run_processes(killed_writer, 2, str(tmp_path))


def test_a_failure_on_one_rank_is_raised_on_every_rank_and_the_next_save_works(
    tmp_path: Path,
) -> None:
    run_processes(fail_in_each_way, 2, str(tmp_path))


SCRIPT = """
import os, resource, signal, sys
import torch
import xds

engine = xds.initialize(
    torch.nn.Linear(64, 64),
    {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"async_save": True},
     "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
)
engine.save_checkpoint(sys.argv[1], "first")
engine.wait_for_checkpoint()
pid = engine._parts.saver._writer._process.pid
if sys.argv[2] == "fails":
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
else:
    os.kill(pid, signal.SIGSTOP)
engine.save_checkpoint(sys.argv[1], "second")
print(pid, flush=True)
if sys.argv[2] == "is slow":
    os.kill(pid, signal.SIGCONT)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["is slow", "fails"])
def test_a_script_waits_at_its_end_for_its_last_checkpoint_which(tmp_path: Path, what: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    if what == "is slow":
        assert not is_running(int(done.stdout))
        assert done.returncode == 0, done.stderr
        assert tags(tmp_path) == ["first", "second"]
        return
    assert done.returncode == 1
    assert re.search(r"second was not saved in \S+: rank 0 failed: OSError", done.stderr)
    assert tags(tmp_path) == ["first"]
    assert (tmp_path / "latest").read_text() == "first"


def save_and_sleep(folder: Path, pipe: Any) -> None:
    engine = engine_of(0, **BACKGROUND)
    engine.save_checkpoint(folder, "first")
    engine.wait_for_checkpoint()
    os.kill(writer_pid(engine), signal.SIGSTOP)
    engine.save_checkpoint(folder, "second")
    pipe.send(writer_pid(engine))
    time.sleep(60)


def test_a_process_that_is_killed_leaves_no_process_and_the_old_checkpoint(tmp_path: Path) -> None:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=save_and_sleep, args=(tmp_path, there), daemon=False)
    process.start()
    pid = here.recv()
    process.kill()
    process.join()
    os.kill(pid, signal.SIGCONT)
    for _ in range(600):
        if not is_running(pid):
            break
        time.sleep(0.1)
    assert not is_running(pid)
    assert tags(tmp_path) == ["first"]
    engine = engine_of(0)
    engine.save_checkpoint(tmp_path, "third")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "latest", "third"]


def test_an_engine_that_is_dropped_takes_its_process_along(tmp_path: Path) -> None:
    engine = engine_of(0, **BACKGROUND)
    engine.save_checkpoint(tmp_path)
    engine.wait_for_checkpoint()
    pid = writer_pid(engine)
    del engine
    gc.collect()
    assert not is_running(pid)


# -- several engines, several checkpoints -------------------------------------------------------------------


def two_engines(folder: str) -> None:
    one, two = engine_of(1, **BACKGROUND), engine_of(2, seed=3)
    one.save_checkpoint(folder, "one")
    one.wait_for_checkpoint()
    with stopped(writer_pid(one)):
        one.save_checkpoint(folder, "one-more")
        two.save_checkpoint(folder, "two")  # takes nothing away that is being written
    one.wait_for_checkpoint()
    assert tags(folder) == ["one", "one-more", "two"]
    for engine in (one, two):
        engine.backward(engine(inputs(0)))
        engine.step()
        engine.destroy()


def test_two_engines_save_into_one_folder_at_the_same_time(tmp_path: Path) -> None:
    run_processes(two_engines, 2, str(tmp_path))


def test_a_folder_is_removed_once_nobody_writes_to_it(tmp_path: Path) -> None:
    first = make_folder(tmp_path, "tag")
    second = make_folder(tmp_path, "tag")
    assert isinstance(first, Claim) and first.folder.exists()
    first.release()
    third = make_folder(tmp_path, "tag")
    assert not first.folder.exists() and second.folder.exists()
    second.release()
    third.release()


def test_keep_last_removes_older_ones_of_the_same_kind(tmp_path: Path) -> None:
    engine = engine_of(0, checkpoint={"async_save": True, "keep_last": 2})
    engine.save_checkpoint(tmp_path, "best")
    for step in range(1, 5):
        engine.global_steps = step
        engine.save_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path, f"epoch-{step}-b", save_latest=False)
    engine.destroy()
    steps = ["global_step3", "global_step4"]
    assert tags(tmp_path) == ["best", "epoch-3-b", "epoch-4-b", *steps]
    assert len(list(tmp_path.iterdir())) == 6


def test_keep_last_never_removes_what_latest_names_nor_what_was_just_saved(tmp_path: Path) -> None:
    engine = engine_of(0, checkpoint={"keep_last": 1})
    engine.global_steps = 3
    engine.save_checkpoint(tmp_path)
    engine.global_steps = 4
    engine.save_checkpoint(tmp_path, save_latest=False)
    assert tags(tmp_path) == ["global_step3", "global_step4"]
    engine.global_steps = 1
    engine.save_checkpoint(tmp_path)  # a run that begins anew in the same folder
    assert tags(tmp_path) == ["global_step1", "global_step3", "global_step4"]
    engine.global_steps = 2
    engine.save_checkpoint(tmp_path)
    assert tags(tmp_path) == ["global_step2", "global_step3", "global_step4"]
    assert xds.newest_checkpoint(tmp_path) == "global_step4"  # by the step; `latest` names step 2


# -- ranks that wait for one another ------------------------------------------------------------------------


def exchange_over(store: Any, timeout_seconds: float) -> Any:
    """That of rank 0 of two."""

    class Ranks:
        rank, world_size = 0, 2

        def store(self) -> Store:
            return Store(store, "0", 0)

    class Job:
        collectives = Ranks()
        folder = Path("folder")

    return background._StoreExchange(Job(), timeout_seconds)  # type: ignore[arg-type]


class Silent:
    """A store in which one rank never says how it ended; `beats` times it is heard."""

    def __init__(self, beats: int) -> None:
        self.beats = beats

    def set(self, key: str, value: str) -> None:
        return

    def compare_set(self, key: str, absent: str, _: str) -> bytes:
        if not key.endswith("/alive"):
            return absent.encode()
        self.beats -= self.beats > 0
        return str(self.beats).encode()

    def delete_key(self, key: str) -> bool:
        return True


def test_a_rank_that_is_not_heard_any_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Silent(beats=20)
    monkeypatch.setattr(background, "MAX_POLL_SECONDS", 0.02)
    answers = exchange_over(store, 0.1).collect({"told": None})
    assert answers[1] == {"error": "rank 1 did not respond for 0 s"}
    assert store.beats == 0


def test_what_others_may_be_reading_stays_in_the_store_until_the_next_save() -> None:
    """A store waits for a key that goes between the question whether it is there and the reading of it."""
    store = dist.HashStore()
    exchange = exchange_over(store, 10.0)
    threading.Timer(0.2, store.set, ("checkpoint/folder/1", '{"told": 7}')).start()
    assert exchange.collect({"told": 5}) == [{"told": 5}, {"told": 7}]
    keys = exchange.close("")
    assert store.check(["checkpoint/folder/0/alive"]) and store.check(["checkpoint/folder/done"])
    for key in keys:
        exchange.delete(key)
    assert store.num_keys() == 0
