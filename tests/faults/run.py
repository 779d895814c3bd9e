"""Seeds each fault of this folder into a copy of the checkout, and says which test finds it first.

    python tests/faults/run.py [NAME ...] [--tests CHECKOUT] [--whole] [--json FILE]

A fault is one file NAME.patch: its first line says what is wrong, the rest is a diff. The first word of NAME
says where: `zero_...` runs tests/zero first. Each fault passes through these stages, until a test fails:

    nearest         the default tests of that folder, with -x
    rest            all other default tests, with -x, folder by folder
    nearest-slow    the slow tests of the folder; only with --whole, or --stages
    rest-slow       all other slow tests; the same

- A test that fails runs once more alone, without the fault and with it. Where it fails without the fault, or
  passes with it, it is no finding: it is left out, here and for all later faults, and its folder runs again.
- The copies lie in a temporary folder. A link named xds on PYTHONPATH stands for the installed package. A test
  that starts Python with another PYTHONPATH sees the checkout, which has no fault.
- A folder that takes longer than --timeout is killed. The test that was running then is the finding, unless it
  passes alone.
- --json keeps the results. Faults that were found, and stages that found nothing, are not run again.
- One job at a time: ranks of two runs would disturb one another.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
# by the first word; others have its name
FOLDERS = {"checkpoint": "engine", "config": "engine", "device": "rehearsal"}
BROAD = (
    "contract",
    "fuzz",
    "zero",
    "engine",
)  # they find most faults of others, so they come first
STAGES = ("nearest", "rest", "nearest-slow", "rest-slow")
ALONE = ("-m", "slow or not slow")
ALONE_SECONDS = 300.0

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


def copy_files(source: Path, target: Path, *, tests: bool) -> None:
    """Copy what git knows or does not ignore: tests/ and pyproject.toml, or all but them."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (name == "pyproject.toml" or name.startswith("tests/")) == tests:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name, follow_symlinks=False)


class Copy:
    """A copy of the checkout, where pytest runs."""

    def __init__(self, work: Path, name: str) -> None:
        self.root = work / name
        self._path = work / f"path_{name}"
        self._path.mkdir()
        (self._path / "xds").symlink_to(self.root, target_is_directory=True)
        (self._path / "first_failure.py").write_text(PLUGIN)

    def pytest(self, *args: str, seconds: float) -> tuple[str, str]:
        """("passed", ""), ("failed", test), or ("timeout", the test that ran after so many seconds)."""
        for name in ("failed", "running"):
            (self._path / name).unlink(missing_ok=True)
        options = ["-x", "-q", "-n0", "-p", "first_failure", "-p", "no:cacheprovider"]
        with open(self._path / "output", "w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *args],
                cwd=self.root,
                env=os.environ | {"PYTHONPATH": str(self._path), "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return "timeout", self._read("running")
        # 5: nothing was collected
        return (
            ("passed", "")
            if status in (0, 5)
            else ("failed", self._read("failed") or self._read("running"))
        )

    def _read(self, name: str) -> str:
        file = self._path / name
        return file.read_text() if file.exists() else ""


def calls_of(stage: str, name: str, tests: Path) -> list[list[str]]:
    """The arguments of each run of pytest in a stage: the files of one folder, the likeliest first."""
    word = name.partition("_")[0]
    nearest = FOLDERS.get(word, word)
    changed = re.findall(r"^\+\+\+ b/(.*)\.py", (HERE / f"{name}.patch").read_text(), re.MULTILINE)
    words = {each for each in re.split("[_/]", "_".join([name, *changed])) if len(each) > 3}
    by_folder: dict[str, list[str]] = {}
    for file in sorted(tests.rglob("test_*.py")):
        here = str(file.relative_to(tests).parent)
        by_folder.setdefault(here, []).append(f"tests/{file.relative_to(tests)}")
    for files in by_folder.values():
        files.sort(key=lambda file: -sum(each in Path(file).stem for each in words))
    folders = [nearest] if stage.startswith("nearest") else [*BROAD, *by_folder]
    chosen = [one for one in dict.fromkeys(folders) if one in by_folder]
    if stage.startswith("rest"):
        chosen = [folder for folder in chosen if folder != nearest]
    return [[*by_folder[folder], *(["-m", "slow"] if "slow" in stage else [])] for folder in chosen]


def find(faulty: Copy, plain: Copy, call: list[str], known: list[str], seconds: float) -> str:
    """The first test of a call that finds the fault; "" if none does. known: those that fail without one."""
    while True:
        left_out = [f"--deselect={test}" for test in known]
        how, test = faulty.pytest(*call, *left_out, seconds=seconds)
        if how == "timeout":
            how = faulty.pytest(test, *ALONE, seconds=ALONE_SECONDS)[0] if test else "passed"
            if how == "passed":
                print(f"    not run to its end: {Path(call[0]).parent}", flush=True)
        if how == "passed":
            return ""
        if not test:
            return "(pytest itself)"
        if plain.pytest(test, *ALONE, seconds=ALONE_SECONDS)[0] == "passed":
            if faulty.pytest(test, *ALONE, seconds=ALONE_SECONDS)[0] != "passed":
                return test
            print(f"    fails once, and then passes with the fault: {test}", flush=True)
        else:
            print(f"    fails without a fault, too: {test}", flush=True)
        if test in known:
            return ""
        known.append(test)


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
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a folder")
    options = parser.parse_args()
    names = options.names or sorted(path.stem for path in HERE.glob("*.patch"))
    stages = options.stages or (STAGES if options.whole else STAGES[:2])
    saved: dict[str, Any] = {"known": [], "faults": {}}
    if options.json and options.json.exists():
        saved = json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        work = Path(folder)
        copy_files(ROOT, work / "plain", tests=False)
        copy_files(options.tests.resolve(), work / "plain", tests=True)
        plain, faulty = Copy(work, "plain"), Copy(work, "faulty")
        plain.pytest("tests", "--collect-only", seconds=ALONE_SECONDS)  # leaves bytecode for all
        for name in names:
            result = saved["faults"].setdefault(name, {"found": "", "seconds": 0, "done": []})
            left = [stage for stage in stages if stage not in result["done"]]
            if result["found"] or not left:
                continue
            shutil.rmtree(faulty.root, ignore_errors=True)
            shutil.copytree(plain.root, faulty.root, symlinks=True)
            patch = ["git", "apply", str(HERE / f"{name}.patch")]
            subprocess.run(patch, cwd=faulty.root, check=True)
            for stage in left:
                start = time.monotonic()
                calls = calls_of(stage, name, plain.root / "tests")
                each = (find(faulty, plain, c, saved["known"], options.timeout) for c in calls)
                result["found"] = next(filter(None, each), "")
                result["seconds"] += round(time.monotonic() - start)
                result["done"].append(stage)
                if options.json:
                    options.json.write_text(json.dumps(saved, indent=1))
                if result["found"]:
                    break
            said = f"found by {result['found']}" if result["found"] else "NOT FOUND"
            print(f"{name}: {said}; {result['done'][-1]}, {result['seconds']} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
