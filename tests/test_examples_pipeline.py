"""Tests of whole runs of examples/pipeline with a tiny model on four ranks."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from script_runs import run_script
from warm_ranks import warm

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "pipeline"
TINY = "--layers 4 --width 32 --heads 2 --context 16 --validate-every 2 --save-every 2"
# the examples import the files beside them, which -P and PYTHONSAFEPATH forbid
ENV = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}


def options(folder: Path, config: str, steps: int) -> list[str]:
    text = folder / "text.py"
    text.write_text((ROOT / "examples" / "gpt" / "train.py").read_text() * 3)
    chosen = f"--config {EXAMPLE / config} --steps {steps} --checkpoints saved --data {text}"
    return [*TINY.split(), *chosen.split()]


def curve(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs" / "pipeline" / "loss.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_trains_validates_saves_and_resumes_with_another_schedule_and_stage(tmp_path: Path) -> None:
    script = str(EXAMPLE / "train.py")
    for config, steps in (("pipeline.json", 4), ("zero_bubble.json", 6)):
        warm(4).run(run_script, script, str(tmp_path), *options(tmp_path, config, steps))
        assert (tmp_path / "saved" / "latest").read_text() == f"global_step{steps}"
    rows = curve(tmp_path)
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [row["validation_loss"] != "" for row in rows] == [False, True] * 3
    # 256 bytes, little learned yet: ln(256) = 5.55
    assert all(5.0 < float(row["loss"]) < 6.0 for row in rows)
    assert all(float(row["gradient_norm"]) > 0 for row in rows)


@pytest.mark.slow
def test_the_line_of_the_readme_trains(tmp_path: Path) -> None:
    line = (
        "xds --nproc-per-node 4 examples/pipeline/train.py --config examples/pipeline/pipeline.json"
    )
    assert line in (ROOT / "README.md").read_text()
    ranks = line.split()[1:3]
    command = [sys.executable, "-m", "xds.launcher.cli", *ranks, str(EXAMPLE / "train.py")]
    done = subprocess.run(
        [*command, *options(tmp_path, "pipeline.json", 2)],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 stages x 2 data ranks" in done.stdout
    assert len(curve(tmp_path)) == 2
