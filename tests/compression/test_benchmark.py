"""A short run of benchmarks/compression."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "compression" / "main.py"


@pytest.mark.slow
def test_bytes_and_memory_are_those_of_the_formulas() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--only", "bytes"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("bytes", "memory"))]
    assert len(rows) == 18 and all("  met" in row for row in rows)
