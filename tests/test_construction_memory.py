"""A short version of benchmarks/construction.py: the memory of building 0.1B parameters on 2 ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "construction.py"


@pytest.mark.slow
def test_building_holds_no_more_than_the_shards_and_the_largest_unit() -> None:
    pytest.importorskip("safetensors")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"  met\b", done.stdout)) == 5
