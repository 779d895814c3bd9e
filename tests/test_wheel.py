"""Tests of the contents of an installed xds: every module, and the sources of native ops."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_an_install_carries_the_sources_of_native_ops(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    csrc = ROOT / "ops" / "csrc"
    wanted = {path.relative_to(csrc) for path in csrc.rglob("*.*") if path.is_file()}
    there = {
        path.relative_to(tmp_path / "xds" / "ops" / "csrc") for path in tmp_path.rglob("csrc/*/*.*")
    }
    assert wanted and there == wanted
    assert (tmp_path / "xds" / "ops" / "kernels" / "__init__.py").exists()
    assert not (tmp_path / "xds" / "setup.py").exists()
