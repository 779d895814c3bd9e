"""The newest committed checkpoint is found, and with `fallback` the one before a damaged one is loaded."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_runs import check_same, damage, engine_of, states_of, train
from helpers import run_new_ranks
from torch import nn

import xds
from xds.engine.checkpoint.io.folders import committed


def file_of(folder: Path) -> str:
    files = json.loads((folder / "manifest.json").read_text())["files"]
    return str(files[0]["path"])


def test_the_newest_committed_checkpoint_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert xds.newest_checkpoint(tmp_path / "empty") is None
    engine = engine_of(0)
    for number in range(3):
        train(engine, number, number + 1)
        engine.save_checkpoint(tmp_path, f"tag{9 - number}", save_latest=number == 0)
    engine.save_checkpoint(tmp_path, "again", save_latest=False)  # the same step, later
    (tmp_path / ".tag99.tmp-0123abcd").mkdir()
    (tmp_path / "tag98").mkdir()
    (tmp_path / "tag98" / "rank_00000-0123abcd.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("a file")
    assert (tmp_path / "latest").read_text() == "tag9"
    assert xds.newest_checkpoint(str(tmp_path)) == "again"
    tags = [one.tag for one in committed(tmp_path)]
    assert tags == ["again", "tag7", "tag8", "tag9"]
    assert not [one for one in caplog.records if one.levelname != "INFO"]
    damage(tmp_path / "again" / "manifest.json", 200)
    (tmp_path / "tag7" / "manifest.json").unlink()
    assert xds.newest_checkpoint(tmp_path) == "tag8"
    next((tmp_path / "tag8").glob("rank_*")).rename(tmp_path / "elsewhere")
    assert xds.newest_checkpoint(tmp_path) == "tag9"
    assert "tag8 is left out" in caplog.text and "is missing or has another length" in caplog.text
    (tmp_path / "elsewhere").rename(tmp_path / "tag8" / file_of(tmp_path / "tag8"))
    assert xds.newest_checkpoint(tmp_path) == "tag8"
    assert "again is left out" in caplog.text and "manifest.json is damaged" in caplog.text
    (tmp_path / "tag8").rename(tmp_path / "renamed")
    assert xds.newest_checkpoint(tmp_path) == "renamed"


def test_a_manifest_without_a_time_is_read(tmp_path: Path) -> None:
    from xds.engine.checkpoint import format as formats

    engine = engine_of(0)
    engine.save_checkpoint(tmp_path, "old")
    path = tmp_path / "old" / "manifest.json"
    raw = json.loads(path.read_text())
    assert raw.pop("saved_seconds") > 1.7e9
    raw["sha256"] = formats.NO_SUM
    text = json.dumps(raw).encode()
    path.write_bytes(formats._with_sum(text, formats.sha256(text).hexdigest()))
    assert xds.newest_checkpoint(tmp_path) == "old"
    engine.load_checkpoint(tmp_path, "old")


# -- falling back -------------------------------------------------------------------------------------------


class Heard(logging.Handler):
    """What xds warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("xds").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def take(self) -> str:
        texts, self.texts = self.texts, []
        return "\n".join(texts)


def fall_back(folder: str) -> None:
    """One damage after another; both ranks agree on what they load instead."""
    rank, root, heard = dist.get_rank(), Path(folder), Heard()
    engine = engine_of(3)
    saved = []
    for number in range(4):
        train(engine, number, number + 1)
        engine.save_checkpoint(folder)
        saved.append(states_of(engine))
    dist.barrier()
    other = engine_of(3, seed=9)

    def loads(tag: str | None, step: int, *warnings: str) -> None:
        dist.barrier()
        with pytest.raises(xds.UsageError):
            other.load_checkpoint(folder, tag)
        path, _ = other.load_checkpoint(folder, tag, fallback=True)
        assert path == f"{folder}/global_step{step}"
        assert other.global_steps == step
        check_same(saved[step - 1], states_of(other))
        text = heard.take()
        for warning in warnings:
            assert (warning in text) == (rank == 0), text
        dist.barrier()

    def change(path: Path, at: int | None) -> None:
        if rank == 0:
            path.unlink() if at is None else damage(path, at)

    step4 = sorted((root / "global_step4").glob("rank_*"))
    change(step4[1], step4[1].stat().st_size - 1)  # what rank 0 does not read
    loads(None, 3, f"{step4[1]} is damaged", f"falling back to {folder}/global_step3")
    change(root / "global_step3" / "manifest.json", 300)
    loads(None, 2, "global_step3 is left out", f"falling back to {folder}/global_step2")
    loads("global_step3", 2, f"{folder}/global_step3/manifest.json is damaged")
    change(root / "latest", 11)  # "global_step5"
    loads(None, 2, f"{folder}/latest is damaged", f"falling back to {folder}/global_step4")
    change(root / "global_step2" / "manifest.json", None)
    loads("global_step2", 1, "global_step2 is not a committed checkpoint")
    change(next((root / "global_step1").glob("rank_00000*"), root), None)  # rank 1 may come late
    dist.barrier()
    before = states_of(other)
    for tag in ("global_step4", "global_step1"):
        with pytest.raises(xds.UsageError, match="no older checkpoint in .* to fall back to"):
            other.load_checkpoint(folder, tag, fallback=True)
    with pytest.raises(xds.UsageError, match="global_step7 is not a committed checkpoint"):
        other.load_checkpoint(folder, "global_step7", fallback=True)
    check_same(before, states_of(other))


@pytest.mark.contract
def test_every_rank_falls_back_to_the_same_older_checkpoint(tmp_path: Path) -> None:
    run_new_ranks(fall_back, 2, str(tmp_path))


def test_what_does_not_fit_is_never_fallen_back_from(tmp_path: Path) -> None:
    small = engine_of(0, model=nn.Linear(3, 3))
    small.save_checkpoint(tmp_path, "small")
    engine = engine_of(0)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, "large")
    with pytest.raises(xds.UsageError, match="large does not fit this model"):
        small.load_checkpoint(tmp_path, fallback=True)
    data = next((tmp_path / "large").glob("rank_*"))
    data.unlink()
    with pytest.raises(xds.UsageError, match="small does not fit this model"):
        engine.load_checkpoint(tmp_path, fallback=True)


def test_a_latest_that_is_no_tag_is_refused_by_name(tmp_path: Path) -> None:
    engine = engine_of(0)
    engine.save_checkpoint(tmp_path, "tag")
    for content in (b"", b"\xff\xfe", b"a/b", b"t\x00g", b"ta", b".tag"):
        (tmp_path / "latest").write_bytes(content)
        with pytest.raises(xds.UsageError, match=f"{tmp_path}/latest is damaged"):
            engine.load_checkpoint(tmp_path)
        assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/tag"


def test_a_file_that_the_disk_cannot_read_counts_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(0)
    engine.save_checkpoint(tmp_path, "old")
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, "new")
    data = next((tmp_path / "new").glob("rank_*"))
    read = os.preadv

    def bad_sector(fd: int, buffers: Any, start: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(data):
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, buffers, start)

    monkeypatch.setattr(os, "preadv", bad_sector)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(xds.UsageError, match=f"{data} cannot be read: .*Input/output error"):
        engine.load_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/old"
    assert len(os.listdir("/proc/self/fd")) == num_open
