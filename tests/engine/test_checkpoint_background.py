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
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks
from test_checkpoint import engine_of, inputs, same, states_of, train, whole

import xds
from xds.engine.checkpoint.io import background
from xds.engine.checkpoint.io.background import Background
from xds.engine.checkpoint.io.folders import Claim, make_folder
from xds.ops.watch import Store

BACKGROUND = {"checkpoint": {"async_save": True}}


def writer_pid(engine: Any) -> int:
    saver = engine._parts.saver
    assert isinstance(saver, Background)
    process = saver._writer._process
    assert process is not None
    pid: int = process.pid
    return pid


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
    os.kill(writer_pid(engine), signal.SIGSTOP)
    saved = states_of(engine)
    engine.save_checkpoint(folder, "second", {"step": 3})
    train(engine, 3, 5)
    progress = engine.checkpoint_progress()
    assert progress is not None and progress.tag == "second"
    assert progress.written_bytes < progress.total_bytes
    assert tags(folder) == ["first"]
    os.kill(writer_pid(engine), signal.SIGCONT)
    engine.wait_for_checkpoint()
    assert engine.checkpoint_progress() is None
    assert tags(folder) == ["first", "second"]
    other = engine_of(stage, seed=9, **more)
    _, client_state = other.load_checkpoint(folder)
    assert client_state == {"step": 3} and other.global_steps == 3
    loaded = states_of(other)
    losses = train(engine, 5, 6), train(other, 3, 4)
    engine.destroy()
    assert all(torch.isfinite(torch.tensor(one)).all() for one in losses)
    return saved, loaded


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_copy_is_exact_though_training_goes_on(tmp_path: Path, world_size: int) -> None:
    for stage, more in ((0, {}), (2, {"bf16": {"enabled": True}}), (3, {})):
        results = run_new_ranks(save_and_go_on, world_size, f"{tmp_path}/{stage}", stage, more)
        # buffers are rank 0's, and are one state among the values
        saved = whole([saved for saved, _ in results][::-1])
        loaded = whole([loaded for _, loaded in results][::-1])
        same(saved, loaded)


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
    run_new_ranks(load_while_writing, 2, str(tmp_path))


# -- what goes wrong ----------------------------------------------------------------------------------------


def full_disk(folder: str) -> None:
    engine = engine_of(2, **BACKGROUND)
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if dist.get_rank() == 1:
        resource.prlimit(writer_pid(engine), resource.RLIMIT_FSIZE, (1000, hard))
    train(engine, 1, 2)
    engine.save_checkpoint(folder)
    saver = engine._parts.saver
    saver._thread.join()
    told = "in the background: global_step2 was not saved in .*: rank 1 failed: OSError"
    with pytest.raises(xds.XdsError, match=told):
        train(engine, 2, 3)
    assert engine.global_steps == 3 and engine.was_step_applied()
    dist.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == ["global_step1", "latest"]
    dist.barrier()  # the next save begins with a folder
    if dist.get_rank() == 1:
        resource.prlimit(writer_pid(engine), resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    engine.save_checkpoint(folder)
    train(engine, 3, 4)
    engine.destroy()
    assert tags(folder) == ["global_step1", "global_step3"]
    assert (Path(folder) / "latest").read_text() == "global_step3"


def test_a_failed_write_is_raised_by_the_next_step_on_every_rank(tmp_path: Path) -> None:
    run_new_ranks(full_disk, 2, str(tmp_path))


def killed_writer(folder: str) -> None:
    engine = engine_of(3, **BACKGROUND)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    if dist.get_rank() == 0:
        os.kill(writer_pid(engine), signal.SIGKILL)
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    with pytest.raises(xds.XdsError, match=r"rank 0 failed: the process that writes .* with -9"):
        engine.wait_for_checkpoint()
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    assert tags(folder) == ["global_step0", "global_step1"]
    engine.destroy()


def test_a_killed_writer_is_named_and_replaced(tmp_path: Path) -> None:
    run_new_ranks(killed_writer, 2, str(tmp_path))


SCRIPT = """
import os, resource, signal, sys, time
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
if sys.argv[2] == "fail":
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
else:
    os.kill(pid, signal.SIGSTOP)
engine.save_checkpoint(sys.argv[1], "second")
print(pid, flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
if sys.argv[2] == "slow":
    os.kill(pid, signal.SIGCONT)
"""


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), how]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )


@pytest.mark.slow
def test_a_script_that_ends_waits_for_its_last_checkpoint(tmp_path: Path) -> None:
    process = start(tmp_path, "slow")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert tags(tmp_path) == ["first", "second"]
    assert not is_running(int(out))


@pytest.mark.slow
def test_a_script_whose_last_checkpoint_failed_does_not_end_well(tmp_path: Path) -> None:
    process = start(tmp_path, "fail")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(r"second was not saved in \S+: rank 0 failed: OSError", err)
    assert tags(tmp_path) == ["first"]
    assert (tmp_path / "latest").read_text() == "first"


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_script_that_is_killed_leaves_no_process_and_the_old_checkpoint(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = start(tmp_path, "wait")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(60) == -number
    os.kill(pid, signal.SIGCONT)
    process.communicate(timeout=60)
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
    train_alone(engine)
    engine.save_checkpoint(tmp_path)
    engine.wait_for_checkpoint()
    pid = writer_pid(engine)
    del engine
    gc.collect()
    assert not is_running(pid)


def train_alone(engine: Any) -> None:
    engine.backward(engine(torch.randn(12, 11)))
    engine.step()


# -- several engines, several checkpoints -------------------------------------------------------------------


def two_engines(folder: str) -> None:
    one, two = engine_of(1, **BACKGROUND), engine_of(2, seed=3)
    one.save_checkpoint(folder, "one")
    one.wait_for_checkpoint()
    os.kill(writer_pid(one), signal.SIGSTOP)
    one.save_checkpoint(folder, "one-more")
    two.save_checkpoint(folder, "two")  # takes nothing away that is being written
    os.kill(writer_pid(one), signal.SIGCONT)
    one.wait_for_checkpoint()
    assert tags(folder) == ["one", "one-more", "two"]
    for engine in (one, two):
        engine.backward(engine(inputs(0)))
        engine.step()
        engine.destroy()


def test_two_engines_save_into_one_folder_at_the_same_time(tmp_path: Path) -> None:
    run_new_ranks(two_engines, 2, str(tmp_path))


def test_a_folder_is_removed_once_nobody_writes_to_it(tmp_path: Path) -> None:
    first = make_folder(tmp_path, "tag")
    second = make_folder(tmp_path, "tag")
    assert isinstance(first, Claim) and first.folder.exists()
    first.release()
    third = make_folder(tmp_path, "tag")
    assert not first.folder.exists() and second.folder.exists()
    second.release()
    third.release()


@pytest.mark.parametrize("does_save_in_background", [False, True])
def test_keep_last_removes_older_ones_of_the_same_kind(
    tmp_path: Path, does_save_in_background: bool
) -> None:
    section = {"async_save": does_save_in_background, "keep_last": 2}
    engine = engine_of(0, checkpoint=section)
    engine.save_checkpoint(tmp_path, "best")
    for _ in range(4):
        train_alone(engine)
        engine.save_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path, f"epoch-{engine.global_steps}-b", save_latest=False)
    engine.destroy()
    steps = ["global_step3", "global_step4"]
    assert tags(tmp_path) == ["best", "epoch-3-b", "epoch-4-b", *steps]
    assert len(list(tmp_path.iterdir())) == 6


def test_keep_last_never_removes_what_latest_names_nor_what_was_just_saved(tmp_path: Path) -> None:
    engine = engine_of(0, checkpoint={"keep_last": 1})
    for _ in range(3):
        train_alone(engine)
    engine.save_checkpoint(tmp_path)
    train_alone(engine)
    engine.save_checkpoint(tmp_path, save_latest=False)
    assert tags(tmp_path) == ["global_step3", "global_step4"]
    other = engine_of(0, checkpoint={"keep_last": 1})
    train_alone(other)
    other.save_checkpoint(tmp_path)  # a run that begins anew in the same folder
    assert tags(tmp_path) == ["global_step1", "global_step3", "global_step4"]
    train_alone(other)
    other.save_checkpoint(tmp_path)
    assert tags(tmp_path) == ["global_step2", "global_step3", "global_step4"]
    assert xds.newest_checkpoint(tmp_path) == "global_step4"  # by the step; `latest` names step 2


# -- ranks that wait for one another ------------------------------------------------------------------------


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

    class Ranks:
        rank, world_size = 0, 2

        def store(self) -> Store:
            return Store(store, "0", 0)

    class Job:
        collectives = Ranks()
        folder = Path("folder")

    monkeypatch.setattr(background, "MAX_POLL_SECONDS", 0.02)
    exchange = background._StoreExchange(Job(), 0.1)  # type: ignore[arg-type]
    answers = exchange.collect({"told": None})
    assert answers[1] == {"error": "rank 1 did not respond for 0 s"}
    assert store.beats == 0


def no_memory(folder: str) -> None:
    engine = engine_of(1, **BACKGROUND)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    memory = engine._parts.saver._writer.memory

    def refuse(size_bytes: int) -> Any:
        raise MemoryError(f"no {size_bytes} bytes")

    if dist.get_rank() == 1:
        engine._parts.saver._writer.memory = refuse
    engine.save_checkpoint(folder, "more")
    with pytest.raises(xds.XdsError, match="more was not saved in .*: rank 1 failed: MemoryError"):
        engine.wait_for_checkpoint()
    engine._parts.saver._writer.memory = memory
    engine.save_checkpoint(folder, "more")
    engine.destroy()
    assert tags(folder) == ["global_step0", "more"]


def test_a_rank_without_memory_for_the_copy_fails_the_save_alone(tmp_path: Path) -> None:
    run_new_ranks(no_memory, 2, str(tmp_path))


def test_what_others_may_be_reading_stays_in_the_store_until_the_next_save() -> None:
    """A store waits for a key that goes between the question whether it is there and the reading of it."""
    store = dist.HashStore()

    class Ranks:
        rank, world_size = 0, 2

        def store(self) -> Store:
            return Store(store, "0", 0)

    class Job:
        collectives = Ranks()
        folder = Path("folder")

    exchange = background._StoreExchange(Job(), 10.0)  # type: ignore[arg-type]
    threading.Timer(0.2, store.set, ("checkpoint/folder/1", '{"told": 7}')).start()
    assert exchange.collect({"told": 5}) == [{"told": 5}, {"told": 7}]
    keys = exchange.close("")
    assert store.check(["checkpoint/folder/0/alive"]) and store.check(["checkpoint/folder/done"])
    for key in keys:
        exchange.delete(key)
    assert store.num_keys() == 0
