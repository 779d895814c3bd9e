"""The GPU benchmark with tiny sizes on a CUDA device that is host memory: every line for a GPU runs once.

See site/sitecustomize.py for what each of its processes gets.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parents[1] / "benchmarks" / "gpu" / "main.py"


def tiny(out: Path, devices: int, *options: str) -> dict[str, dict[str, Any]]:
    """The rows by name."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("the device's stand-in needs Linux and g++")
    paths = [str(HERE / "site"), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(out)}
    variables |= {"XDS_REHEARSAL": str(devices), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--minutes", "5", "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "# tiny sizes, no results" in done.stdout
    files = [file for file in out.glob("*.json") if ".trace." not in file.name]
    rows = {row["name"]: row for file in files for row in json.loads(file.read_text())["rows"]}
    missing = {name: row["note"] for name, row in rows.items() if row["value"] is None}
    assert set(missing.values()) <= {"no --deepspeed FOLDER"}, missing
    assert {row["void"] for row in rows.values()} <= {"tiny sizes", "not measured"}
    return rows


@pytest.mark.slow
def test_steps_memory_and_checkpoints(tmp_path: Path) -> None:
    rows = tiny(tmp_path, 1, "--train", "--memory", "--checkpoints")
    assert rows["350M compiled: xds-3 / plain"]["value"]
    for stage in (0, 2, 3):
        launches = rows[f"350M stage {stage}: launches of the update"]
        assert launches["value"] == launches["must"] - 1  # `decide` is part of the norm
    for stage in (0, 3):
        peak = rows[f"350M stage {stage}: allocated peak / (plan + activations)"]
        assert 0.9 < peak["value"] < 1.05
    assert rows["stage 3 background: load"]["value"]


@pytest.mark.slow
def test_ranks(tmp_path: Path) -> None:
    rows = tiny(tmp_path, 4, "--ranks")
    assert 0 < rows["share of NCCL hidden behind kernels, stage 3"]["value"] < 1
    gaps = [row for name, row in rows.items() if "gloo" in name or name.startswith("NCCL")]
    assert len(gaps) == 5
    assert all(row["value"] <= row["must"] for row in gaps)
