"""The newest committed checkpoint is found, and with `fallback` the one before a damaged one is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_engine_checkpoint import damage, engine_of, train

import xds
from xds.engine.checkpoint.folders import committed


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
    assert caplog.text == ""
    damage(tmp_path / "again" / "manifest.json", 200)
    (tmp_path / "tag7" / "manifest.json").unlink()
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
