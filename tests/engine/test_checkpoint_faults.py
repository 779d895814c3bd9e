"""A disk that fails at any call of a save: every rank raises, the old checkpoint loads, the next save works."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from broken_disk import BrokenDisk
from checkpoint_runs import check_same, engine_of, states_of
from helpers import run_processes
from torch import nn

import xds
from xds.engine.checkpoint.io import storage
from xds.engine.checkpoint.io.folders import MANIFEST, committed
from xds.engine.process.process import join, pick_device

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "checkpoint")]
from kill_runs import Killer, Scenario, Tally  # noqa: E402

WIDTH = 5
MAX_CALLS = 200
IN_BACKGROUND = {"checkpoint": {"async_save": True, "keep_last": 2}}


def tiny(stage: int = 1, **more: Any) -> Any:
    return engine_of(stage, model=nn.Linear(WIDTH, WIDTH), **more)


def take_step(engine: Any) -> None:
    loss = engine(torch.randn(4, WIDTH)).square().mean()
    engine.backward(loss)
    engine.step()


def save(engine: Any, folder: Path, tag: str | None) -> str:
    """What the save raised, or ""."""
    try:
        engine.save_checkpoint(folder, tag)
        if hasattr(engine, "wait_for_checkpoint"):
            engine.wait_for_checkpoint()
    except xds.XdsError as error:
        return str(error)
    return ""


def everybodys(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def leftovers(folder: Path) -> list[str]:
    """Files and folders that no checkpoint needs."""
    found = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    for manifest in committed(folder):
        needed = {record.path for record in manifest.files} | {MANIFEST}
        there = {path.name for path in (folder / manifest.tag).iterdir()}
        assert needed <= there
        found += [f"{manifest.tag}/{name}" for name in sorted(there - needed)]
    return found


def every_call(folder: str, victim: int, kind: str, tag: str | None, more: dict[str, Any]) -> int:
    """Let each call of a save fail on the rank `victim`; the number of calls.

    A save of which only the cleaning up fails is a save.
    """
    root = Path(folder)
    engine, other = tiny(**more), tiny(seed=9)
    saved: dict[int, Any] = {}

    def remember() -> None:
        take_step(engine)
        saved[engine.global_steps] = states_of(engine)

    remember()
    assert save(engine, root, tag) == ""
    last_step = engine.global_steps
    for fails_at in range(MAX_CALLS):
        remember()
        disk = BrokenDisk(root, fails_at, kind if dist.get_rank() == victim else "eio")
        if dist.get_rank() != victim:
            disk.fails_at = -1
        with disk.in_place(storage):
            said = save(engine, root, tag)
        sentences = everybodys(said)
        hit, count = everybodys((disk.hit, disk.count))[victim]
        where = f"{kind}, call {fails_at} on rank {victim}: {hit}: {sentences}"
        assert len(set(sentences)) == 1, where
        if said:
            assert not hit.startswith(("unlink", "rmdir")), where
            reason = "Input/output error" if kind == "eio" else "No space left on device"
            assert hit and reason in said and f"rank {victim}" in said, where
        other.load_checkpoint(folder)
        assert other.global_steps == last_step or other.global_steps == engine.global_steps, where
        assert said or other.global_steps == engine.global_steps, where
        check_same(saved[other.global_steps], states_of(other))
        if count <= fails_at:
            assert said == "" and not leftovers(root)
            return fails_at
        remember()
        dist.barrier()
        assert save(engine, root, tag) == "", where
        dist.barrier()
        assert not leftovers(root), where
        last_step = engine.global_steps
    raise AssertionError("a save never came to its end")


@pytest.mark.parametrize(
    ("victim", "kind", "tag", "more", "least"),
    [
        (0, "eio", "again", {"checkpoint": {"keep_last": 2}}, 13),
        (1, "short", None, {}, 3),  # open, write, fsync
        (1, "full", "again", {}, 3),
        (0, "full", None, IN_BACKGROUND, 13),
    ],
)
@pytest.mark.quick("1-full-again-more2-3", "1-short-None-more1-3")
def test_whichever_call_fails_all_ranks_raise_and_both_checkpoints_are_whole(
    tmp_path: Path, victim: int, kind: str, tag: str | None, more: Any, least: int
) -> None:
    counts = run_processes(every_call, 2, str(tmp_path), victim, kind, tag, more)
    assert counts[0] >= least


# -- a file system that is full -----------------------------------------------------------------------------


def fill_up(folder: str, more: dict[str, Any]) -> None:
    """Save until there is no room; free some; go on."""
    more = {"checkpoint": {**more.get("checkpoint", {}), "keep_last": 0}}
    root, engine, other = Path(folder), tiny(**more), tiny(seed=9)
    saved = {}
    filler = root / "filler"
    if dist.get_rank() == 0:
        free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
        filler.write_bytes(b"0" * max(0, free - 200_000))
    dist.barrier()
    for _ in range(200):
        take_step(engine)
        saved[engine.global_steps] = states_of(engine)
        said = save(engine, root, None)
        if said:
            break
    assert "No space left on device" in said
    assert len(set(everybodys(said))) == 1
    assert not leftovers(root)
    other.load_checkpoint(folder)
    assert other.global_steps == engine.global_steps - 1 > 1
    check_same(saved[other.global_steps], states_of(other))
    dist.barrier()
    if dist.get_rank() == 0:
        filler.unlink()
    dist.barrier()
    assert save(engine, root, None) == ""
    other.load_checkpoint(folder)
    assert other.global_steps == engine.global_steps


@pytest.mark.contract
@pytest.mark.parametrize("more", [{}, IN_BACKGROUND], ids=["direct", "background"])
def test_on_a_full_disk_every_rank_raises_and_the_last_checkpoint_loads(
    tmp_path: Path, more: Any
) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        run_processes(fill_up, 2, str(tmp_path), more)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# -- a file system on which only rank 0 makes folders -------------------------------------------------------


def only_the_first(folder: str) -> None:
    root = Path(folder) / "made" / "by_rank_0"
    engine = tiny()

    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() > 0:
            for name in ("mkdir", "rename", "replace", "rmdir", "unlink"):
                patch.setattr(os, name, refuse)
        for tag in (None, "again", "again"):
            take_step(engine)
            assert save(engine, root, tag) == ""
        tiny(seed=9).load_checkpoint(root)


def test_only_rank_0_makes_renames_and_removes(tmp_path: Path) -> None:
    run_processes(only_the_first, 2, str(tmp_path))


# -- SIGKILL at random instants; the long form, and its figures: benchmarks/checkpoint/kills.py ------------

KILLS = 2
SCENARIOS = [
    Scenario(stage=3, victims="all", keep_last=2),
    Scenario(stage=2, victims="one", same_tag=True),
    Scenario(stage=3, victims="one", keep_last=2, async_save=True),
    Scenario(stage=2, victims="all", same_tag=True, async_save=True, width=128),
]


def kill_often(scenario: Scenario, seed: int) -> Tally:
    killer = Killer(scenario, seed, window_seconds=0.15)
    for _ in range(KILLS):
        killer.trial()
    return killer.finish()


@pytest.mark.slow
def test_no_kill_loses_or_tears_a_checkpoint() -> None:
    join(pick_device())  # once: engines of several threads may not open the process group together
    # side by side: a rank whose peer was killed waits three seconds for what the peer may have to say
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        tallies = list(pool.map(kill_often, SCENARIOS, range(len(SCENARIOS))))
    assert [problem for tally in tallies for problem in tally.problems] == []
    assert sum(tally.inside for tally in tallies) > 0
