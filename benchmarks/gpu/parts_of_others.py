"""Sections --ops and --tests: the table of benchmarks/cuda_ops, and the tests that need a GPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from scale import ROOT
from session import Session, scratch

from harness import Row  # isort: skip

# `python -m pytest` would put the root on the path, where folders have names of standard modules
PYTEST = (
    "import sys; getattr(sys.flags, 'safe_path', 0) or sys.path.pop(0); "
    "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)


def run_ops(session: Session) -> None:
    """The rows of benchmarks/cuda_ops: they have the optimizer against the copy, and all in one."""
    found = session.measure_rate()
    if session.dry:
        _dry_ops(session, found)
        return
    folder = ROOT / "benchmarks" / "cuda_ops"
    if session.small:
        _small_ops(session, folder)
        return
    minutes = max(0.5, session.left / 60 - 1.5)
    before = {path: path.stat().st_mtime for path in (folder / "results").glob("*.json")}
    command = [sys.executable, str(folder / "main.py"), "--minutes", f"{minutes:.1f}"]
    code = _stream(session, command)
    fresh = [p for p in (folder / "results").glob("*.json") if p.stat().st_mtime != before.get(p)]
    if not fresh:
        session.skip("cuda_ops", f"the command ended with code {code} and kept nothing", 1.0)
        return
    for row in json.loads(max(fresh, key=lambda p: p.stat().st_mtime).read_text())["rows"]:
        verdict = row.pop("verdict")
        made = Row(**row)
        made.void = made.void or ("not measured" if verdict == "not measured" else "")
        session.add(made)


def _small_ops(session: Session, folder: Path) -> None:
    """Builds the kernels, and takes three rounds of as many rows as half a minute has. It keeps no file."""
    options = ["--quick", "--minutes", "0.5"]
    code = _stream(session, [sys.executable, str(folder / "main.py"), *options])
    note = "the exit code of benchmarks/cuda_ops --quick"
    session.add(Row("cuda_ops: exit code", float(code), must=0.0, unit="", note=note))


def _dry_ops(session: Session, found: dict[str, object]) -> None:
    """Without a GPU cuda_ops only compiles. Here it imports, and names its rows."""
    folder = ROOT / "benchmarks" / "cuda_ops"
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import main, json; "
        "print(json.dumps([row.name for row in main.not_measured()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(folder.parent)],
        capture_output=True,
        text=True,
        timeout=max(5.0, session.left),
        env=session.env,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-1500:])
    for name in json.loads(done.stdout.splitlines()[-1]):
        session.skip(name, "dry run")


def run_tests(session: Session) -> None:
    """`pytest -m gpu` on the files that have such tests; the counts, and the names of failed tests."""
    session.measure_rate()
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text() and path.name != "test_gpu_benchmark.py"
    )
    report = scratch() / "tests.xml"
    report.unlink(missing_ok=True)
    if session.small:
        files = [name for name in files if name.endswith("test_watch_device.py")] or files[:1]
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-rs"]
    code = _stream(session, [sys.executable, "-c", PYTEST, *options, *files])
    if not report.exists():
        session.skip("tests that need a GPU: failed", f"pytest ended with code {code}", 0.0)
        return
    _count(session, report, code)


def _count(session: Session, report: Path, code: int) -> None:
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    passed = len(cases) - len(bad) - len(skipped)
    for case in bad:
        print(f"# failed: {case.get('classname')}::{case.get('name')}")
    note = f"{passed} passed, {len(bad)} failed, {len(skipped)} skipped"
    row = Row("tests that need a GPU: failed", float(len(bad)), must=0.0, unit="", note=note)
    if code not in (0, 1) or not (passed or bad):
        row.void, row.note = "not measured", f"{note}; pytest ended with code {code}"
    session.add(row)


def _stream(session: Session, command: list[str]) -> int:
    """Run a command with its output on ours; -9 if it takes too long. First it is asked to end."""
    process = subprocess.Popen(command, cwd=ROOT, env=session.env)
    limit = max(5.0, session.left - 20)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"# stopped after {limit:.0f} s", flush=True)
    process.send_signal(signal.SIGINT)  # pytest then writes its report
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return -9
