"""Which checkpoint is the newest, whatever the clock says; what a fallback loads; names of tags and folders."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import check_same, damage, engine_of, states_of, train
from helpers import run_processes
from manifest_damages import rewrite
from torch import nn

import xds
from xds.engine.checkpoint import load
from xds.engine.checkpoint.imports.importing import import_checkpoint
from xds.engine.checkpoint.io import folders, storage
from xds.engine.checkpoint.io.folders import MAX_TAG_BYTES, committed, newest_first
from xds.engine.checkpoint.io.reader import CheckpointReader
from xds.engine.checkpoint.manifest import Manifest
from xds.engine.deepspeed.training.checkpoints import refuse_theirs

DATA = Path(__file__).parents[1] / "data" / "deepspeed_checkpoints"


def tiny(**checkpoint: Any) -> Any:
    return engine_of(0, model=nn.Linear(2, 2), checkpoint=checkpoint)


def data_of(folder: Path) -> Path:
    return next(folder.glob("rank_*"))


# -- the newest ---------------------------------------------------------------------------------------------


def tags_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that goes back a day with every look."""
    now = [time.time()]

    def earlier() -> float:
        now[0] -= 86_400
        return now[0]

    monkeypatch.setattr(time, "time", earlier)


@pytest.mark.usefixtures("clock")
def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path) -> None:
    engine = tiny(keep_last=2)
    for step in range(8, 12):  # 11 is more than 9, and "11" is less than "9"
        engine.global_steps = engine.micro_steps = step
        engine.save_checkpoint(tmp_path)
        kept = [f"global_step{one}" for one in (step - 1, step) if one > 7]
        assert tags_in(tmp_path) == sorted(kept)
        assert xds.newest_checkpoint(tmp_path) == f"global_step{step}"
    data_of(tmp_path / "global_step11").write_bytes(b"")
    assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/global_step10"


@pytest.mark.usefixtures("clock")
def test_tags_of_the_same_step_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    engine = tiny(keep_last=2)
    for number in (2, 9, 10, 11):
        engine.save_checkpoint(tmp_path, f"part-{number}")
        engine.save_checkpoint(tmp_path, "best", save_latest=False)
    assert tags_in(tmp_path) == ["best", "part-10", "part-11"]
    assert [one.tag for one in committed(tmp_path) if one.tag != "best"] == ["part-11", "part-10"]
    engine.micro_steps += 1  # half a step is further than none
    engine.save_checkpoint(tmp_path, "half", save_latest=False)
    assert xds.newest_checkpoint(tmp_path) == "half"


def test_a_run_that_went_back_falls_back_along_its_own_steps(tmp_path: Path) -> None:
    engine = tiny()
    for step in (100, 200, 300, 110, 120):
        engine.global_steps = engine.micro_steps = step
        engine.save_checkpoint(tmp_path)
    data_of(tmp_path / "global_step120").unlink()
    assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/global_step110"


def test_without_latest_a_fallback_takes_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny()
    assert engine.load_checkpoint(tmp_path, fallback=True) == (None, None)
    for step in (1, 2, 3):
        engine.global_steps = step
        engine.save_checkpoint(tmp_path, save_latest=False)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "fallback=True loads the newest checkpoint there" in caplog.text
    assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/global_step3"
    assert f"no file `latest` in {tmp_path}; falling back to global_step3" in caplog.text
    data_of(tmp_path / "global_step3").write_bytes(b"")
    assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/global_step2"
    data = data_of(tmp_path / "global_step2")
    damage(data, data.stat().st_size - 1)  # found out only when it is read
    assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/global_step1"


def test_the_newest_committed_checkpoint_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert xds.newest_checkpoint(tmp_path / "empty") is None
    engine = tiny()
    for number in range(3):
        engine.global_steps = number
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
    data = data_of(tmp_path / "tag8")
    data.rename(tmp_path / "elsewhere")
    assert xds.newest_checkpoint(tmp_path) == "tag9"
    assert "tag8 is left out" in caplog.text and "is missing or has another length" in caplog.text
    (tmp_path / "elsewhere").rename(data)
    assert xds.newest_checkpoint(tmp_path) == "tag8"
    assert "again is left out" in caplog.text and "manifest.json is damaged" in caplog.text
    (tmp_path / "tag8").rename(tmp_path / "renamed")
    assert xds.newest_checkpoint(tmp_path) == "renamed"


def test_a_manifest_without_a_time_is_read(tmp_path: Path) -> None:
    engine = tiny()
    engine.save_checkpoint(tmp_path, "old")
    rewrite(tmp_path / "old", lambda raw: raw.pop("saved_seconds"))
    assert xds.newest_checkpoint(tmp_path) == "old"
    engine.load_checkpoint(tmp_path, "old")


def test_the_newest_time_of_a_kind_counts_in_any_order() -> None:
    """Of one step: "best" was saved between two tags of another kind."""

    def of(tag: str, saved_seconds: float) -> Manifest:
        return cast(
            Manifest,
            SimpleNamespace(tag=tag, saved_seconds=saved_seconds, global_steps=3, micro_steps=3),
        )

    found = [of("step3_part1", 9.0), of("step3_part2", 1.0), of("best", 5.0)]
    for order in itertools.permutations(found):
        tags = [one.tag for one in newest_first(order)]
        assert tags == ["step3_part2", "step3_part1", "best"]


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
    run_processes(fall_back, 2, str(tmp_path))


def test_what_does_not_fit_is_never_fallen_back_from(tmp_path: Path) -> None:
    small = tiny()
    small.save_checkpoint(tmp_path, "small")
    engine = engine_of(0)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, "large")
    with pytest.raises(xds.UsageError, match="large does not fit this model"):
        small.load_checkpoint(tmp_path, fallback=True)
    data_of(tmp_path / "large").unlink()
    with pytest.raises(xds.UsageError, match="small does not fit this model"):
        engine.load_checkpoint(tmp_path, fallback=True)


def test_a_latest_that_is_no_tag_is_refused_by_name(tmp_path: Path) -> None:
    engine = tiny()
    engine.save_checkpoint(tmp_path, "tag")
    for content in (b"", b"\xff\xfe", b"a/b", b"t\x00g", b"ta", b".tag"):
        (tmp_path / "latest").write_bytes(content)
        with pytest.raises(xds.UsageError, match=f"{tmp_path}/latest is damaged"):
            engine.load_checkpoint(tmp_path)
        assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/tag"


def test_a_file_that_the_disk_cannot_read_counts_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny()
    engine.save_checkpoint(tmp_path, "old")
    engine.global_steps += 1
    engine.save_checkpoint(tmp_path, "new")
    data = data_of(tmp_path / "new")
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


# -- while another process saves ----------------------------------------------------------------------------


@pytest.mark.parametrize("tag", [None, "same"])
@pytest.mark.parametrize("fallback", [False, True])
def test_what_another_run_removes_while_it_loads_is_loaded_or_the_newer_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str | None, fallback: bool
) -> None:
    """keep_last, or the same tag again, removes files at each place of a load."""
    trainer, reader = tiny(keep_last=1), tiny()
    saved = {}

    def save() -> None:
        trainer.global_steps += 1
        with torch.no_grad():
            trainer.module.weight.add_(1.0)
        trainer.save_checkpoint(tmp_path, tag)
        saved[trainer.global_steps] = states_of(trainer)

    def during(place: str, times: int = 1) -> None:
        original, left = getattr(load, place), [times]

        def replaced(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if left[0]:
                left[0] -= 1
                save()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(load, place, replaced)
            path, _ = reader.load_checkpoint(tmp_path, tag, fallback=fallback)
        assert path is not None and reader.global_steps in saved
        check_same(saved[reader.global_steps], states_of(reader))

    save()
    for place, is_newer in (
        ("read_manifest", True),
        ("_begin", True),
        ("prepare", False),  # every file is open
        ("set_engine", False),
        ("find_tag", tag is None),
    ):
        before = trainer.global_steps
        during(place)
        assert reader.global_steps == before + (is_newer or place == "find_tag")
    during("read_manifest", 5)
    assert reader.global_steps == trainer.global_steps
    before = states_of(reader)
    with monkeypatch.context() as patch, pytest.raises(xds.UsageError, match="is missing"):
        original = load.read_manifest

        def removed(folder: Path, name: str) -> Any:
            found = original(folder, name)
            data_of(tmp_path / name).unlink()
            return found

        patch.setattr(load, "read_manifest", removed)
        reader.load_checkpoint(tmp_path, tag, fallback=fallback)
    check_same(before, states_of(reader))


def test_two_runs_save_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other run may do between two calls of this one."""
    engine, left = tiny(), [2]
    engine.save_checkpoint(tmp_path, "tag")
    make = storage.Disk.make_folder

    def taken_for_a_leftover(disk: storage.Disk, folder: Path) -> None:
        make(disk, folder)
        if folders.TEMPORARY.fullmatch(folder.name) and left[0]:
            left[0] -= 1
            folders._remove_leftovers(tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(storage.Disk, "make_folder", taken_for_a_leftover)
        engine.global_steps += 1
        engine.save_checkpoint(tmp_path, "tag")
    assert left == [0] and engine.load_checkpoint(tmp_path)[0] is not None
    claim = storage.Disk().claim(tmp_path / "tag")  # the other run commits under the tag
    threading.Timer(0.2, claim.release).start()
    engine.save_checkpoint(tmp_path, "tag")
    assert claim._fd < 0
    names = ["pruned"]
    original = folders.named_in
    monkeypatch.setattr(folders, "named_in", lambda path: names.pop() if names else original(path))
    assert engine.load_checkpoint(tmp_path)[0] == f"{tmp_path}/tag" and not names


# -- names --------------------------------------------------------------------------------------------------


def test_what_is_no_folder_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine: Any = tiny()
    for folder in ("", " ", None, 5, b"out", "a\0b"):
        for call, name in ((engine.save_checkpoint, "save"), (engine.load_checkpoint, "load")):
            said = rf"{name}_checkpoint: {name}_dir = .* is not the path of a f"
            with pytest.raises(xds.UsageError, match=said):
                call(folder)
    assert os.listdir(tmp_path) == []
    engine.save_checkpoint(Path())  # the working folder, said aloud
    assert engine.load_checkpoint(".")[0] == "global_step0"


def test_a_tag_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    engine = tiny()
    bad = [
        "a/b",
        "",
        ".hidden",
        "latest",
        " lead",
        "trail ",
        "a\nb",
        "a\0b",
        "a\x1b[31m",
        "\ud800",
        "a\u2028b",
        "manifest.json",
    ]
    for tag in (*bad, "x" * (MAX_TAG_BYTES + 1), "ü" * 200, True, 1.5, b"bytes", ["tag"]):
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(xds.UsageError, match=r"_checkpoint: tag = ") as found:
                call(tmp_path / "new", tag)
            assert str(found.value).isprintable() and len(str(found.value)) < 400, ascii(tag)
    assert not (tmp_path / "new").exists()


def test_a_tag_that_is_saved_is_loaded_by_latest(tmp_path: Path) -> None:
    engine = tiny()
    for tag in ("ünï 日本", "[a]*", "-1", "LATEST", 7, "x" * MAX_TAG_BYTES):
        engine.save_checkpoint(tmp_path, tag)
        assert engine.load_checkpoint(tmp_path)[0] == f"{tmp_path}/{tag}"
        assert engine.load_checkpoint(tmp_path, tag)[0] == f"{tmp_path}/{tag}"


def test_a_hostile_latest_is_refused_by_everything_that_reads_it(tmp_path: Path) -> None:
    """Text of another encoding, a file of 16 GB, a name that no file can have."""
    shape = DATA / "plain_zero1_fp16"
    readers: list[Callable[[Path], Any]] = [
        tiny().load_checkpoint,
        CheckpointReader,
        lambda folder: import_checkpoint(folder, tmp_path / "imported", kind="deepspeed"),
        lambda folder: refuse_theirs(folder, None) or tiny().load_checkpoint(folder),
        lambda folder: xds.init_inference(nn.Linear(4, 4), checkpoint=str(folder), dtype="fp32"),
    ]
    for number, content in enumerate((b"\xff\xfeg", b"x" * 300, b"x\0y", 16 << 30)):
        folder = tmp_path / str(number)
        shutil.copytree(shape, folder)
        latest = folder / "latest"
        latest.unlink(missing_ok=True)
        if isinstance(content, int):
            with open(latest, "wb") as file:
                file.truncate(content)
        else:
            latest.write_bytes(content)
        for reader in readers:
            with pytest.raises(xds.UsageError) as said:
                reader(folder)
            assert str(said.value).isprintable() and len(str(said.value)) < 600
