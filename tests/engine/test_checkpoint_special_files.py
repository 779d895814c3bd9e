"""Pipes, devices, folders and huge files where a checkpoint has files, and JSON that names a thing twice."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from manifest_damages import MANIFEST, manifest_text, with_sum
from torch import nn

import xds
from xds.launcher import checkpoint as command
from xds.utils import small_files
from xds.utils.small_files import parse_json, read_small_text

SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "a pipe that received no data"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "a device, not a file"),
    "a folder": (Path.mkdir, "Is a directory"),
    "a huge file": (lambda path: _sparse(path), "is it the right file"),
}


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(64 << 30)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}
    engine = xds.initialize(model, config)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    engine.save_checkpoint(folder, "tag")
    return engine, folder


@pytest.mark.parametrize(
    ("name", "kind"), [("latest", "a pipe"), *(("tag/manifest.json", kind) for kind in SPECIAL)]
)
def test_what_is_no_file_is_refused_in_one_sentence(
    saved: tuple[Any, Path],
    kind: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(small_files, "PIPE_SECONDS", 0.1)
    engine, good = saved
    folder = shutil.copytree(good, tmp_path / "c")
    make, says = SPECIAL[kind]
    (folder / name).unlink()
    make(folder / name)
    says = f"{folder / name} cannot be read: .*{says}"
    for read in (xds.get_fp32_state_dict, engine.load_checkpoint):
        with pytest.raises(xds.UsageError, match=says):
            read(folder)
    assert command.main(["verify", str(folder)]) == 1
    assert says[:40] in capsys.readouterr().err
    shutil.copytree(good / "tag", folder / "older")
    assert engine.load_checkpoint(folder, fallback=True)[0] is not None


def test_a_pipe_for_a_file_of_tensors_is_not_waited_for(
    saved: tuple[Any, Path], tmp_path: Path
) -> None:
    engine, good = saved
    folder = shutil.copytree(good, tmp_path / "c")
    data = next((folder / "tag").glob("rank_*"))
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(xds.UsageError, match="has 0 bytes and should have"):
        engine.load_checkpoint(folder)


# -- a name twice -------------------------------------------------------------------------------------------


def test_json_has_one_meaning() -> None:
    assert parse_json('{"a": [1, {"a": null}], "b": 1e3}') == {"a": [1, {"a": None}], "b": 1e3}
    for text, says in {
        '{"a": 1, "b": {"c": 1, "c": 1}}': "has the key 'c' twice in one object",
        '{"a": NaN}': "has the number NaN",
        "[" * 100_000: "is nested too deeply",
        "{": "is not JSON",
        "9" * 5000: "is not JSON",
    }.items():
        with pytest.raises(ValueError, match=f"^{says}"):
            parse_json(text)
    with pytest.raises(ValueError, match="^is not JSON"):
        parse_json(b'"\xff"')


def test_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"ab\xff")
    with pytest.raises(OSError) as error:
        read_small_text(tmp_path / "file")
    assert "byte 2 is not UTF-8" in error.value.strerror
    (tmp_path / "file").write_text("\ufeffab", encoding="utf-8")
    assert read_small_text(tmp_path / "file") == "ab"
    with pytest.raises(OSError):
        read_small_text(f"{tmp_path}/a\0b")


def refused(engine: Any, folder: Path, says: str) -> None:
    assert command.main(["verify", str(folder)]) == 1
    with pytest.raises(xds.UsageError, match=says):
        engine.load_checkpoint(folder)


def test_a_key_twice_in_a_manifest_is_refused(saved: tuple[Any, Path], tmp_path: Path) -> None:
    engine, good = saved
    folder = shutil.copytree(good, tmp_path / "c")
    path = folder / "tag" / MANIFEST
    raw = json.loads(path.read_text())
    raw["state"]["counters"]["TWICE"] = 9
    del raw["sha256"]
    path.write_bytes(with_sum(json.dumps(raw)[1:].replace("TWICE", "global_steps")))
    refused(engine, folder, "has the key 'global_steps' twice")


def test_a_header_that_gives_a_tensor_the_bytes_of_another_is_refused(
    saved: tuple[Any, Path], tmp_path: Path
) -> None:
    engine, good = saved
    folder = shutil.copytree(good, tmp_path / "c")
    path = folder / "tag" / MANIFEST
    raw = json.loads(path.read_text())
    record = raw["files"][0]
    file = folder / "tag" / record["path"]
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    table = json.loads(content[8 : 8 + length])
    value, state = (
        next(name for name in table if name.startswith(start))
        for start in ("value/", "state/exp_avg/")
    )
    for name, says in (("TWICE", f"has the key '{value}' twice"), (value, "bytes in common")):
        header = json.dumps({**table, name: table[state]}).replace("TWICE", value).encode()
        header += b" " * (-len(header) % 64)
        changed = struct.pack("<Q", len(header)) + header + content[8 + length :]
        file.write_bytes(changed)
        size = record["chunk_bytes"]
        record["size_bytes"] = len(changed)
        starts = range(0, len(changed), size)
        record["crc32"] = [zlib.crc32(changed[at : at + size]) for at in starts]
        path.write_bytes(manifest_text(raw))
        refused(engine, folder, says)
