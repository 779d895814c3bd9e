"""Whole runs of examples/gpt with a tiny model: what a newcomer starts first has to work."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt"
# the examples import the files beside them, which -P and PYTHONSAFEPATH forbid
ENV = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
TWO_RANKS = [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2"]
ONE_PROCESS = [sys.executable]
TINY = "--layers 2 --width 32 --heads 2 --context 16 --steps 4 --validate-every 2 --sample 8"


def run(start: list[str], folder: Path, *options: str) -> str:
    """Run the example on its own source as text, in `folder`; its output."""
    text = folder / "text.py"
    text.write_text((EXAMPLE / "train.py").read_text() * 3)
    command = [*start, str(EXAMPLE / "train.py"), *TINY.split(), "--data", str(text), *options]
    done = subprocess.run(
        command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("start", "config"),
    [
        (TWO_RANKS, "zero0.json"),
        (TWO_RANKS, "zero3.json"),
        (TWO_RANKS, "zero3_bf16.json"),
        (ONE_PROCESS, "zero2.json"),
    ],
)
def test_trains_validates_and_samples(start: list[str], config: str, tmp_path: Path) -> None:
    output = run(start, tmp_path, "--config", str(EXAMPLE / config))
    with (tmp_path / "runs" / "gpt" / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["validation_loss"] != "" for row in rows] == [False, True, False, True]
    # 256 bytes, nothing learned yet: ln(256) = 5.55
    assert all(5.0 < float(row["loss"]) < 6.0 for row in rows)
    assert all(float(row["gradient_norm"]) > 0 for row in rows)
    assert "validation loss 5." in output
    assert "\ndef " in output


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    command = [*ONE_PROCESS, str(EXAMPLE / "train.py"), "--data", str(text)]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "short.txt has 9 bytes of text" in done.stderr
