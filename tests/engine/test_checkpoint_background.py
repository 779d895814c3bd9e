"""Saving in the background: exact though training goes on, one at a time, never silently lost; keep_last."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from checkpoint_runs import BF16, engine_of, inputs, same, states_of, train, whole
from helpers import run_processes, run_ranks
from safetensors import safe_open
from torch import nn

import xds
from xds.engine.checkpoint import saver as saver_module
from xds.engine.checkpoint.io.folders import make_folder
from xds.engine.checkpoint.io.storage import Claim
from xds.engine.checkpoint.io.tensor_file import write_image
from xds.ops.watch.store import Store

BACKGROUND = {"checkpoint": {"async_save": True}}


@contextmanager
def stopped(fails: str = "") -> Iterator[None]:
    """Meanwhile the thread of a save waits before it writes. fails: then the disk of this rank is full."""
    goes_on = threading.Event()

    def write(*args: Any) -> Any:
        goes_on.wait()
        if fails:
            raise OSError(errno.ENOSPC, fails)
        return write_image(*args)

    with mock.patch.object(saver_module, "write_image", write):
        try:
            yield
        finally:
            goes_on.set()
            for thread in threading.enumerate():
                if fails and thread.name == "xds-checkpoint":
                    thread.join()


def tags(folder: str | Path) -> list[str]:
    """Committed tags."""
    return sorted(path.parent.name for path in Path(folder).glob("[!.]*/manifest.json"))


# -- what is written ----------------------------------------------------------------------------------------


def save_and_go_on(folder: str, stage: int, more: dict[str, Any]) -> Any:
    engine = engine_of(stage, **more, **BACKGROUND)
    train(engine, 0, 2)
    engine.save_checkpoint(folder, "first")
    engine.wait_for_checkpoint()
    train(engine, 2, 3)
    with stopped():
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


@pytest.mark.parametrize(("stage", "more"), [(2, BF16), (3, {})])
@pytest.mark.quick("3-more1")
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
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()

    def check(others: set[str]) -> None:
        dist.barrier()
        left = {path.name for path in root.iterdir()}
        assert left == {"latest", "global_step1", *others}
        assert (root / "latest").read_text() == "global_step1"
        dist.barrier()  # the next save begins with a folder

    # the disk is full on rank 1: the next step says it, and is a step
    with stopped(fails="full" if rank == 1 else ""):
        engine.save_checkpoint(folder, "full")
    engine._parts.saver._thread.join()
    with pytest.raises(
        xds.XdsError, match="in the background: full was not saved in .*: rank 1 failed: OSError"
    ):
        train(engine, 1, 2)
    assert engine.global_steps == 2 and engine.was_step_applied()
    check(set())

    # rank 1 has no memory for the copy
    with mock.patch.object(saver_module, "copy_image", side_effect=MemoryError if rank else None):
        engine.save_checkpoint(folder, "large")
    with pytest.raises(xds.XdsError, match="large was not saved in .*: rank 1 failed: MemoryError"):
        engine.wait_for_checkpoint()
    check(set())

    # rank 1 does not see the folder of rank 0
    engine.save_checkpoint(root.parent / f"{root.name}_of_rank1" if rank else root, "apart")
    with pytest.raises(xds.XdsError, match="rank 1 failed: this rank saves in .*_of_rank1.*; give"):
        engine.wait_for_checkpoint()
    check(set())

    # all is written, and rank 0 cannot give it its name
    with stopped():
        engine.save_checkpoint(folder, "taken")
        dist.barrier()
        if rank == 0:
            (root / "taken").write_text("a file")
    with pytest.raises(xds.XdsError, match="taken was not saved in .*: rank 0 failed: NotADirect"):
        engine.wait_for_checkpoint()
    check({"taken"})

    engine.save_checkpoint(folder)
    train(engine, 3, 4)
    engine.destroy()
    assert tags(folder) == ["global_step1", "global_step2"]
    assert (root / "latest").read_text() == "global_step2"


def test_a_failure_on_one_rank_is_raised_on_every_rank_and_the_next_save_works(
    tmp_path: Path,
) -> None:
    run_processes(fail_in_each_way, 2, str(tmp_path))


SCRIPT = """
import errno, sys, time
import torch
import xds
from xds.engine.checkpoint import saver

engine = xds.initialize(
    torch.nn.Linear(64, 64),
    {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"async_save": True},
     "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
)
engine.save_checkpoint(sys.argv[1], "first")
engine.wait_for_checkpoint()
write_image = saver.write_image

def write(*args):
    time.sleep(1)  # the script is over by then
    if sys.argv[2] == "fails":
        raise OSError(errno.ENOSPC, "No space left on device")
    return write_image(*args)

saver.write_image = write
engine.save_checkpoint(sys.argv[1], "second")
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["is slow", "fails"])
def test_a_script_waits_at_its_end_for_its_last_checkpoint_which(tmp_path: Path, what: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    if what == "is slow":
        assert done.returncode == 0, done.stderr
        assert tags(tmp_path) == ["first", "second"]
        return
    assert done.returncode == 1
    assert re.search(r"second was not saved in \S+: rank 0 failed: OSError", done.stderr)
    assert tags(tmp_path) == ["first"]
    assert (tmp_path / "latest").read_text() == "first"


# -- several engines, several checkpoints -------------------------------------------------------------------


def two_engines(folder: str) -> None:
    one, direct = engine_of(1, **BACKGROUND), engine_of(2, seed=3)
    one.save_checkpoint(folder, "one")
    one.wait_for_checkpoint()
    with stopped():
        one.save_checkpoint(folder, "one-more")
        direct.save_checkpoint(folder, "two")  # takes nothing away that is being written
    one.wait_for_checkpoint()
    assert tags(folder) == ["one", "one-more", "two"]
    for engine in (one, direct):
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


def test_a_smaller_save_has_nothing_of_a_larger_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    model[0].requires_grad_(False)
    engine = engine_of(0, model=model, **BACKGROUND)
    engine.save_checkpoint(tmp_path, "all")
    engine.save_checkpoint(tmp_path, "trained", exclude_frozen_parameters=True)
    engine.wait_for_checkpoint()
    engine.destroy()
    for path in tmp_path.glob("*/*.safetensors"):
        with safe_open(path, "pt") as file:  # it refuses bytes that belong to no tensor
            assert list(file.keys())


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


# -- ranks that wait for one another ------------------------------------------------------------------------


def exchange_over(store: Any, timeout_seconds: float) -> Any:
    """That of rank 0 of two."""

    class Ranks:
        rank, world_size = 0, 2

        def store(self) -> Store:
            return Store(store, "0", 0)

    class Job:
        collectives, rank = Ranks(), 0
        folder = Path("folder")

    return saver_module._Messages(Job(), timeout_seconds)  # type: ignore[arg-type]


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


def save_without_memory(folder: str) -> str:
    engine = engine_of(1, **BACKGROUND)
    train(engine, 0, 1)
    with mock.patch.object(saver_module, "host_memory", side_effect=xds.UsageError("no memory")):
        with pytest.raises(xds.XdsError) as caught:
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
    engine.destroy()
    return str(caught.value)


def saved_at_the_end(folder: str) -> list[str]:
    engine = engine_of(1, **BACKGROUND)
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    engine.destroy()
    return sorted(os.listdir(folder))


def test_a_rank_that_waits_for_a_save_lets_the_others_start_it(tmp_path: Path) -> None:
    """Of ranks that are threads, and take turns."""
    found, _ = run_ranks(saved_at_the_end, 2, str(tmp_path))
    assert "latest" in found


def test_a_copy_without_memory_names_the_setting(tmp_path: Path) -> None:
    for message in run_processes(save_without_memory, 2, str(tmp_path)):
        assert "checkpoint.async_save = true: there are no" in message


def test_a_rank_that_is_not_heard_any_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Silent(beats=20)
    monkeypatch.setattr(saver_module, "MAX_POLL_SECONDS", 0.02)
    messages = exchange_over(store, 0.1)
    assert messages.collect({"told": None})[1] == {"error": "rank 1 did not respond for 0 s"}
    assert store.beats == 0
    messages.end()


def test_what_others_may_be_reading_stays_in_the_store_until_the_next_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store waits for a key that goes between the question whether it is there and the reading of it."""
    monkeypatch.setattr(saver_module, "BEAT_SECONDS", 0.05)
    store = dist.HashStore()
    messages = exchange_over(store, 10.0)
    threading.Timer(0.2, store.set, ("checkpoint/folder/1", '{"told": 7}')).start()
    assert messages.collect({"told": 5}) == [{"told": 5}, {"told": 7}]
    keys = messages.tell("")
    messages.end()
    assert store.check(["checkpoint/folder/0/alive"]) and store.check(["checkpoint/folder/done"])
    messages.delete(keys)
    assert store.num_keys() == 0
