"""The newest checkpoint is the one whose training is further, whatever the clock says; and names of folders."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import xds
from xds.engine.checkpoint.io.folders import MAX_TAG_BYTES, committed
from xds.engine.checkpoint.manifest import Manifest
from xds.engine.checkpoint.order import newest_first


def engine_of(**checkpoint: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "checkpoint": checkpoint,
    }
    return xds.initialize(nn.Linear(2, 2), config)


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
    engine = engine_of(keep_last=2)
    for step in range(1, 12):  # 11 is more than 9, and "11" is less than "9"
        engine.global_steps = engine.micro_steps = step
        engine.save_checkpoint(tmp_path)
        kept = [f"global_step{one}" for one in (step - 1, step) if one]
        assert tags_in(tmp_path) == sorted(kept)
        assert xds.newest_checkpoint(tmp_path) == f"global_step{step}"
    data = next((tmp_path / "global_step11").glob("rank_*"))
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/global_step10"


@pytest.mark.usefixtures("clock")
def test_tags_of_the_same_step_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    engine = engine_of(keep_last=2)
    for number in (1, 2, 9, 10, 11):
        engine.save_checkpoint(tmp_path, f"part-{number}")
        engine.save_checkpoint(tmp_path, "best", save_latest=False)
    assert tags_in(tmp_path) == ["best", "part-10", "part-11"]
    assert [one.tag for one in committed(tmp_path) if one.tag != "best"] == ["part-11", "part-10"]
    engine.micro_steps += 1  # half a step is further than none
    engine.save_checkpoint(tmp_path, "half", save_latest=False)
    assert xds.newest_checkpoint(tmp_path) == "half"


def test_a_run_that_went_back_falls_back_along_its_own_steps(tmp_path: Path) -> None:
    engine = engine_of()
    for step in (100, 200, 300, 110, 120):
        engine.global_steps = engine.micro_steps = step
        engine.save_checkpoint(tmp_path)
    next((tmp_path / "global_step120").glob("rank_*")).unlink()
    assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/global_step110"


def test_without_latest_a_fallback_takes_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of()
    assert engine.load_checkpoint(tmp_path, fallback=True) == (None, None)
    for step in (1, 2, 3):
        engine.global_steps = step
        engine.save_checkpoint(tmp_path, save_latest=False)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "fallback=True loads the newest checkpoint there" in caplog.text
    assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/global_step3"
    assert f"no file `latest` in {tmp_path}; falling back to global_step3" in caplog.text
    next((tmp_path / "global_step3").glob("rank_*")).write_bytes(b"")
    assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/global_step2"
    data = next((tmp_path / "global_step2").glob("rank_*"))
    data.write_bytes(data.read_bytes()[:-1] + b"x")  # found out only when it is read
    assert engine.load_checkpoint(tmp_path, fallback=True)[0] == f"{tmp_path}/global_step1"


# -- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "folder", ["", " ", None, 5, b"out", "a\0b", [], ["out"]], ids=lambda one: repr(one)
)
def test_what_is_no_folder_is_refused_in_one_sentence(
    tmp_path: Path, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = engine_of()
    with pytest.raises(
        xds.UsageError, match=r"save_checkpoint: save_dir = .* is not the path of a f"
    ):
        engine.save_checkpoint(folder)
    with pytest.raises(
        xds.UsageError, match=r"load_checkpoint: load_dir = .* is not the path of a f"
    ):
        engine.load_checkpoint(folder)
    assert os.listdir(tmp_path) == []
    engine.save_checkpoint(Path())  # the working folder, said aloud
    assert engine.load_checkpoint(".")[0] == "global_step0"


@pytest.mark.parametrize(
    "tag",
    [
        *(" lead", "trail ", "a\nb", "a\0b", "a\x1b[31m", "\ud800", "a\u2028b", "manifest.json"),
        *("x" * (MAX_TAG_BYTES + 1), "ü" * 200, True, 1.5, b"bytes", {"a": 1}, ["tag"]),
    ],
    ids=lambda one: ascii(one)[:20],
)
def test_a_tag_that_could_not_be_loaded_is_not_saved(tmp_path: Path, tag: Any) -> None:
    engine = engine_of()
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(xds.UsageError, match=r"_checkpoint: tag = ") as found:
            call(tmp_path / "new", tag)
        assert str(found.value).isprintable() and len(str(found.value)) < 400
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("tag", ["ünï 日本", "[a]*", "-1", "LATEST", 7, "x" * MAX_TAG_BYTES])
def test_a_tag_that_is_saved_is_loaded_by_latest(tmp_path: Path, tag: Any) -> None:
    engine = engine_of()
    engine.save_checkpoint(tmp_path, tag)
    assert engine.load_checkpoint(tmp_path)[0] == f"{tmp_path}/{tag}"
    assert engine.load_checkpoint(tmp_path, tag)[0] == f"{tmp_path}/{tag}"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_newest_time_of_a_kind_counts_in_any_order(order: tuple[int, ...]) -> None:
    """Of one step: "best" was saved between two tags of another kind."""

    def of(tag: str, saved_seconds: float) -> Manifest:
        return cast(
            Manifest,
            SimpleNamespace(tag=tag, saved_seconds=saved_seconds, global_steps=3, micro_steps=3),
        )

    found = [of("step3_part1", 9.0), of("step3_part2", 1.0), of("best", 5.0)]
    tags = [one.tag for one in newest_first(found[at] for at in order)]
    assert tags == ["step3_part2", "step3_part1", "best"]
