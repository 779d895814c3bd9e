"""Every fault of tests/faults still applies to the code, so that a change that moves its place is noticed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_fault_applies() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout; a copy may have a fault")
    patches = sorted((ROOT / "tests" / "faults").glob("*.patch"))
    assert len(patches) > 100
    broken = [
        patch.name
        for patch in patches
        if subprocess.run(
            ["git", "apply", "--check", patch], cwd=ROOT, capture_output=True
        ).returncode
    ]
    assert not broken, f"write these again, each for the code of now: {', '.join(broken)}"
