"""A short version of benchmarks/pipeline.py: it runs, and its losses agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "pipeline.py"


@pytest.mark.slow
def test_a_step_has_the_loss_of_torch_s_pipeline() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("step, ")]
    assert rows and not any(word in row for row in rows for word in ("FAIL", "VOID", "SKIP"))
