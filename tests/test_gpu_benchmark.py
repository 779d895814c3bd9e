"""Dry runs of benchmarks/gpu: every section runs on a CPU, keeps its deadline and writes its file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu" / "main.py"


def dry(out: Path, *options: str) -> tuple[str, dict[str, dict[str, object]]]:
    """The output, and the rows of all files by name."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry-run", "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "TMPDIR": str(out)},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    files = [
        json.loads(file.read_text()) for file in out.glob("*.json") if ".trace." not in file.name
    ]
    assert all(file["dry_run"] and file["versions"]["torch"] for file in files)
    return done.stdout, {row["name"]: row for file in files for row in file["rows"]}


def reasons(rows: dict[str, dict[str, object]]) -> set[object]:
    """Why rows were not measured."""
    return {row["note"] for row in rows.values() if row["value"] is None}


@pytest.mark.slow
def test_a_section_runs_without_a_gpu(tmp_path: Path) -> None:
    text, rows = dry(tmp_path, "--trace")
    assert rows["350M stage 3: launches of the update"]["value"]
    assert not reasons(rows)
    assert "For benchmarks/README.md" in text


@pytest.mark.slow
@pytest.mark.parametrize("section", ["tests", "ops", "train", "memory", "ranks", "checkpoints"])
def test_every_section_runs_without_a_gpu(section: str, tmp_path: Path) -> None:
    _, rows = dry(tmp_path, f"--{section}")
    allowed = {
        "tests": set(),
        "ops": {"dry run"},
        "train": {"no --deepspeed FOLDER"},
        "ranks": {"the trace has no NCCL kernels"},
    }
    assert reasons(rows) <= allowed.get(section, set())


@pytest.mark.slow
def test_a_section_ends_in_time(tmp_path: Path) -> None:
    _, rows = dry(tmp_path, "--train", "--minutes", "0.1")
    assert any(str(reason).startswith("time") for reason in reasons(rows))
