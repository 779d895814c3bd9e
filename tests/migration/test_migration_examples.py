"""The three scripts of docs/migration.md, started on two ranks by `xds --as-deepspeed`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "migration"
RUNS = [
    ("loop.py", ["--deepspeed_config", str(FOLDER / "loop.json")], "stage 3", ""),
    (
        "trainer.py",
        ["--deepspeed", str(FOLDER / "zero3.json"), "--steps", "3"],
        "stage 3",
        "transformers",
    ),
    ("accelerated.py", ["--stage", "2", "--epochs", "1"], "stage 2", "accelerate"),
]


@pytest.mark.parametrize(("script", "args", "stage", "needs"), RUNS)
def test_a_script_of_the_guide_runs_by_the_command_alone(
    script: str, args: list[str], stage: str, needs: str, tmp_path: Path
) -> None:
    if needs:
        pytest.importorskip(needs)
    assert "xds" not in "".join(
        line for line in (FOLDER / script).read_text().splitlines() if "import" in line
    )
    start = [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2", "--as-deepspeed"]
    done = subprocess.run(
        [*start, str(FOLDER / script), *args],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"stands in for deepspeed; {stage}, 2 ranks, fp32" in done.stdout
    assert "loss " in done.stdout.splitlines()[-1]
