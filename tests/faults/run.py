"""Seeds each fault of this folder into a copy of the checkout, and says which test finds it first.

    python tests/faults/run.py [NAME ...] [--tests CHECKOUT] [--whole] [--json FILE]

A fault is one file NAME.patch: its first line says what is wrong, the rest is a diff. The first word of NAME
says where: `zero_...` runs tests/zero first. Each fault passes through these stages, until a test fails:

    nearest         the default tests of that folder, with -x
    rest            all other default tests, with -x
    nearest-slow    the slow tests of the folder; only with --whole, or --stages
    rest-slow       all other slow tests; the same

- A test that fails is run once more in a copy without the fault. If it fails there too, it is no finding: it is
  left out, here and for all later faults, and the stage runs again.
- The copies lie in a temporary folder. A link named xds on PYTHONPATH stands for the installed package. A test
  that starts Python with another PYTHONPATH sees the checkout, which has no fault.
- A folder is one run of pytest. One that lasts longer than --timeout is killed. The test that was running then
  is the finding, unless it passes alone.
- --json keeps the results. Faults that were found, and stages that found nothing, are not run again.
- One job at a time: ranks of two runs would disturb one another.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = {"checkpoint": "engine", "config": "engine"}  # by the first word; others have its name
BROAD = (
    "contract",
    "fuzz",
    "zero",
    "engine",
)  # folders that find most faults of others, so they come first
STAGES = ("nearest", "rest", "nearest-slow", "rest-slow")
ALONE_SECONDS = 300

# writes the test that runs, and the first one that fails
PLUGIN = """
import pathlib

HERE = pathlib.Path(__file__).parent


def pytest_runtest_logstart(nodeid):
    (HERE / "running").write_text(nodeid)


def _failed(report):
    if report.failed and not (HERE / "failed").exists():
        (HERE / "failed").write_text(report.nodeid)


pytest_runtest_logreport = pytest_collectreport = _failed
"""


def copy_of(checkout: Path, tests: Path, folder: Path) -> Path:
    """A copy of the files that git knows or does not ignore, with tests/ and pyproject.toml of `tests`."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    for source in dict.fromkeys((checkout, tests)):
        listed = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            is_test = name == "pyproject.toml" or name.startswith("tests/")
            wanted = (source == tests) if is_test else (source == checkout)
            if wanted and (source / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, folder / name, follow_symlinks=False)
    return folder


class Copy:
    """One copy, where pytest runs. `timeout_seconds`: of each run."""

    def __init__(self, work: Path, name: str, timeout_seconds: float) -> None:
        self.root = work / name
        self._path = work / f"path_{name}"
        self._path.mkdir()
        (self._path / "xds").symlink_to(self.root, target_is_directory=True)
        (self._path / "first_failure.py").write_text(PLUGIN)
        self._timeout_seconds = timeout_seconds

    def pytest(self, *args: str, timeout_seconds: float = 0.0) -> tuple[str, str]:
        """("passed", ""), ("failed", test), ("timeout", test) or ("none", "") where nothing was collected."""
        for name in ("failed", "running"):
            (self._path / name).unlink(missing_ok=True)
        options = ["-x", "-q", "--tb=short", "-p", "first_failure", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, *args]
        environment = os.environ | {"PYTHONPATH": str(self._path), "PYTHONSAFEPATH": "1"}
        with open(self._path / "output", "w") as output:
            process = subprocess.Popen(
                *(command,),
                **{"cwd": self.root, "env": environment, "start_new_session": True},
                **{"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT},
            )
            try:
                status = process.wait(timeout_seconds or self._timeout_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return "timeout", self._read("running")
        if status in (0, 5):
            return ("passed" if status == 0 else "none"), ""
        return "failed", self._read("failed")

    def _read(self, name: str) -> str:
        file = self._path / name
        return file.read_text() if file.exists() else ""


def calls_of(stage: str, name: str, tests: Path) -> list[list[str]]:
    """The arguments of each run of pytest in a stage."""
    word = name.partition("_")[0]
    nearest = FOLDERS.get(word, word)
    marks = ["-m", "slow"] if stage.endswith("slow") else []
    folders = sorted({str(file.relative_to(tests).parent) for file in tests.rglob("test_*.py")})
    folders.sort(key=lambda folder: BROAD.index(folder) if folder in BROAD else len(BROAD))
    if stage.startswith("nearest"):
        return [[f"tests/{nearest}", *marks]] if nearest in folders else []
    others = [folder for folder in folders if folder not in (nearest, ".")]
    files = [f"tests/{file.name}" for file in sorted(tests.glob("test_*.py"))]
    return [[f"tests/{folder}", *marks] for folder in others] + [[*files, *marks]]


class Trial:
    """Runs stages for one fault. `known`: tests that fail without a fault."""

    def __init__(self, faulty: Copy, plain: Copy, known: list[str]) -> None:
        self._faulty, self._plain, self._known = faulty, plain, known

    def run(self, calls: list[list[str]]) -> str:
        """The first test that finds the fault; "" if none does."""
        return next(filter(None, map(self._run, calls)), "")

    def _run(self, arguments: list[str]) -> str:
        while True:
            left_out = [f"--deselect={test}" for test in self._known]
            how, test = self._faulty.pytest(*arguments, *left_out)
            if how in ("passed", "none"):
                return ""
            marks = ["-m", "slow or not slow"]
            if how == "timeout" and test:
                alone = self._faulty.pytest(test, *marks, timeout_seconds=ALONE_SECONDS)[0]
                if alone == "passed":
                    print(f"    not run to its end: {' '.join(arguments)}", flush=True)
                    return ""
            if not test:
                return "(pytest itself)"
            if self._plain.pytest(test, *marks, timeout_seconds=ALONE_SECONDS)[0] == "passed":
                return f"{test} ({how})" if how == "timeout" else test
            print(f"    fails without a fault, too: {test}", flush=True)
            self._known.append(test)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="faults; default: all")
    parser.add_argument("--tests", type=Path, default=ROOT, help="a checkout with other tests")
    parser.add_argument("--whole", action="store_true", help="slow tests as well")
    parser.add_argument("--stages", nargs="+", choices=STAGES, help="only these")
    parser.add_argument("--json", type=Path, help="file of the results")
    parser.add_argument("--jobs", type=int, default=1, choices=[1])
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of a pytest run")
    options = parser.parse_args()
    names = options.names or sorted(path.stem for path in HERE.glob("*.patch"))
    stages = options.stages or (STAGES if options.whole else STAGES[:2])
    saved: dict[str, Any] = {"known": [], "faults": {}}
    if options.json and options.json.exists():
        saved = json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        work = Path(folder)
        copy_of(ROOT, options.tests.resolve(), work / "plain")
        plain = Copy(work, "plain", options.timeout)
        faulty = Copy(work, "faulty", options.timeout)
        plain.pytest("tests", "--collect-only")  # leaves bytecode for all copies
        for name in names:
            result = saved["faults"].setdefault(name, {"found": "", "seconds": 0.0, "done": []})
            left = [stage for stage in stages if stage not in result["done"]]
            if result["found"] or not left:
                continue
            shutil.rmtree(faulty.root, ignore_errors=True)
            shutil.copytree(plain.root, faulty.root, symlinks=True)
            patch = ["git", "apply", "--whitespace=nowarn", str(HERE / f"{name}.patch")]
            subprocess.run(patch, cwd=faulty.root, check=True)
            trial = Trial(faulty, plain, saved["known"])
            for stage in left:
                start = time.monotonic()
                found = trial.run(calls_of(stage, name, plain.root / "tests"))
                result["seconds"] += time.monotonic() - start
                result |= {"found": found, "stage": stage, "done": [*result["done"], stage]}
                saved["faults"][name] = result
                if options.json:
                    options.json.write_text(json.dumps(saved, indent=1))
                if found:
                    break
            said = result["found"] or "NOT FOUND"
            print(f"{name}: {said} [{result['stage']}, {result['seconds']:.0f} s]", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
