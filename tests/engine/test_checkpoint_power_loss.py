"""Power lost at any instant of a save, whatever the file system had not made durable: the checkpoint before it
loads, and from the moment that a save has returned, its own."""

from __future__ import annotations

import importlib
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
from checkpoint_runs import engine_of
from power_loss import Recorder, lay_out
from torch import nn

from xds.engine.checkpoint.io import folders
from xds.engine.checkpoint.io.folders import MANIFEST, committed, read_latest

WRITERS = [folders, importlib.import_module("xds.engine.checkpoint.io.writer")]


def record(base: Path, tags: list[str | None], keep_last: int = 0) -> Recorder:
    """Save once for each tag, in a folder inside of a folder that is not there yet."""
    base.mkdir()
    engine = engine_of(0, model=nn.Linear(3, 3), checkpoint={"keep_last": keep_last})
    recorder = Recorder(base)
    with recorder.in_place(*WRITERS):
        for tag in tags:
            engine.global_steps += 1
            engine.save_checkpoint(base / "runs" / "out", tag)
            recorder.promised = engine.global_steps
            recorder.note("returned", str(base))
    return recorder


def problems(recorder: Recorder, scratch: Path) -> list[str]:
    """What is wrong in which of the states; every different state is looked at once."""
    found, seen = [], set()
    for after, (tree, promised) in recorder.states:
        key = (promised, frozenset((path, content) for path, content in tree.items()))
        if key in seen:
            continue
        seen.add(key)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        lay_out(tree, scratch)
        try:
            check(scratch / "runs" / "out", promised)
        except Exception as error:
            found.append(f"after {after}: {type(error).__name__}: {error}: {sorted(tree)}")
    assert len(seen) > 20
    return found


def check(folder: Path, promised: int) -> None:
    manifests = committed(folder) if folder.is_dir() else []
    shown = [path for path in folder.glob("[!.]*") if (path / MANIFEST).exists()]
    assert len(manifests) == len(shown), "a checkpoint is torn"
    for manifest in manifests:
        for one in manifest.files:
            content = (folder / manifest.tag / one.path).read_bytes()
            chunks = range(0, len(content), one.chunk_bytes)
            sums = [zlib.crc32(content[at : at + one.chunk_bytes]) for at in chunks]
            assert sums == list(one.crc32), "a file is torn"
    steps = {manifest.tag: manifest.global_steps for manifest in manifests}
    latest = read_latest(folder) if folder.is_dir() else None
    assert max(steps.values(), default=0) >= promised, "the newest is lost"
    assert latest is None or latest in steps, "latest names what is not there"
    assert (steps[latest] if latest else 0) >= promised, "latest is too old"


CASES: dict[str, tuple[list[str | None], int]] = {
    "new": ([None, None], 0),
    "pruned": ([None, None, None], 1),
    "again": (["tag", "tag", "tag"], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_was_not_synced_is_not_needed(tmp_path: Path, case: str) -> None:
    tags, keep_last = CASES[case]
    recorder = record(tmp_path / "disk", tags, keep_last)
    assert problems(recorder, tmp_path / "after") == []


def test_a_sync_that_is_left_out_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: without the fsync of folders there are states that do not load."""

    def nothing(*_: Any) -> None:
        return

    monkeypatch.setattr(folders, "sync_folder", nothing)
    recorder = record(tmp_path / "disk", ["tag", "tag"])
    assert problems(recorder, tmp_path / "after")
