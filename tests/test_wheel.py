"""Tests of the contents of an installed xds: every module, and the sources of native ops."""

import subprocess
import sys
from itertools import product
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
    assert (tmp_path / "xds" / "__main__.py").exists()


def test_the_first_command_says_what_it_downloads_and_python_m_xds_is_xds(tmp_path):
    run = ROOT / "examples" / "first" / "run.py"
    for has_uv, words in product((False, True), ([], ["--tests"])):
        environ = {"PATH": "/nonexistent", **({"UV": "/bin/uv"} if has_uv else {})}
        command = [sys.executable, run, "--dry-run", *words]
        out = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
        said, *commands = out.stdout.splitlines()
        assert "downloads torch for CPUs" in said and f"into {ROOT / '.venv'}" in said
        assert ("/bin/uv pip install" in out.stdout) == has_uv != ("-m pip install" in out.stdout)
        assert commands[-1].endswith("/pytest" if words else "examples/first/train.py")
    command = [sys.executable, "-m", "xds", "--version"]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert out.stdout.startswith("xds ")
