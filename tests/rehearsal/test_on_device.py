"""Tests that were written for the CPU pass with ranks on the device. See tests_on_device.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SELECTED = [
    "zero/test_late_gradients.py",  # ranks whose graphs differ
    "zero/test_edits.py::test_a_write_on_one_rank_only_is_refused_on_all",
    "engine/test_accumulation.py",
    "engine/test_misuse.py",
]


@pytest.mark.slow
def test_a_selection_passes_on_the_device() -> None:
    files = [str(TESTS / name) for name in SELECTED]
    command = [
        str(Path(sys.executable).with_name("pytest")),
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"XDS_REHEARSE": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
