"""Short runs of benchmarks/compression."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_hosts import why_not

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "compression"
MAIN, LINKS = FOLDER / "main.py", FOLDER / "links.py"


def run(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
    )


@pytest.mark.slow
def test_bytes_and_memory_are_those_of_the_formulas() -> None:
    done = run(MAIN, "--quick", "--only", "bytes")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("bytes", "memory"))]
    assert len(rows) == 18 and all("  met" in row for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not(False)), reason=why_not(False) or "hosts can be made")
def test_a_run_over_slow_links_sends_what_the_formula_says() -> None:
    """Four hosts at 100 Mb/s, 40 steps with 8 of warm-up."""
    done = run(LINKS, "--quick", "--pairs", "1", "--only", "run, stage 1, bf16")
    if "SKIP: " in done.stdout:
        pytest.skip(done.stdout.partition("SKIP: ")[2])
    assert done.returncode == 0, done.stdout + done.stderr
    name = "run, stage 1, bf16: bytes, off the formula"
    rows = [line for line in done.stdout.splitlines() if line.startswith(name)]
    assert len(rows) == 1 and "  met" in rows[0], done.stdout
