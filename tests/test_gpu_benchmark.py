"""benchmarks/gpu: parts that fail in every way, what runs again, the table, and a dry run of all parts."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"
RIGHT = """
import json, os
open(os.environ["XDS_BENCH_RECORDS"], "a").write(json.dumps({"case": "c1", "ok": True, "text": ""}) + "\\n")
"""
FAULTS = {
    "right": RIGHT,
    "build": "print('# build cuda'); raise RuntimeError('nvcc fatal: no such file')",
    "hangs": RIGHT + "import time\nprint('# waits')\ndef wait(): time.sleep(600)\nwait()",
    "memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); bytearray(1 << 32)",
    "crashes": RIGHT + "print('# a null pointer')\nimport ctypes\nctypes.string_at(0)",
    "wrong": RIGHT.replace("True", "False").replace('"c1"', '"loss"'),
    "killed": "import os; os.kill(os.getpid(), 9)",
    "silent": "pass",
}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """main.py, with `runner` and `table` as it imports them."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("main")
    finally:
        sys.path[:] = before
        for name in ("main", "runner", "table"):
            sys.modules.pop(name, None)


def part(gpu: Any, name: str, code: str, seconds: float = 60, needs: float = 3) -> Any:
    return gpu.Part(name, (sys.executable, "-S", "-c", code), seconds, needs)


def options(out: Path, **more: Any) -> argparse.Namespace:
    known: dict[str, Any] = {
        "dry_run": True,
        "tiny": False,
        "out": out,
        "carry": None,
        "only": None,
    }
    return argparse.Namespace(**known | more)


def measured(gpu: Any, phases: list[Any], out: Path, seconds: float = 60) -> Any:
    """The results of one call, with its folder of logs."""
    results = gpu.Results(options(out), {"name": "fake", "capability": "", "gpus": 1})
    env = {**os.environ, "TMPDIR": str(out), "XDS_BENCH_DEVICE": "cpu"}
    gpu.measure(phases, results, env, time.monotonic() + seconds)
    return results


def test_every_fault_ends_its_part_alone_and_the_table_tells_it(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [part(gpu, name, code, 0.8 if name == "hangs" else 60) for name, code in FAULTS.items()]
    phases = [gpu.Phase(tuple(parts), 60, 4)]
    results = measured(gpu, phases, tmp_path)
    reasons = {name: each["reason"] for name, each in results.content["parts"].items()}
    assert reasons == {
        "right": "",
        "build": "exit code 1 in: build cuda",
        "hangs": "killed after 1 s in: waits",
        "memory": "exit code 1",
        "crashes": "SIGSEGV in: a null pointer",
        "wrong": "wrong: loss",
        "killed": "killed by the system, which may be out of memory",
        "silent": "it ended without a record",
    }
    assert gpu.show(options(tmp_path), results, phases, "9 s") == 1
    text = capsys.readouterr().out
    for line in ("nvcc fatal: no such file", "in wait", "MemoryError", "in string_at"):
        assert line in text
    assert "1 of   1 right" in text
    assert len(text.splitlines()) <= 60
    assert json.loads(results.file.read_text())["void"] == "dry run"


def test_only_what_is_missing_or_wrong_runs_again(gpu: Any, tmp_path: Path) -> None:
    def count(name: str) -> str:
        return f"open({str(tmp_path / name)!r}, 'a').write('x')\n"

    def again(wrong: str) -> dict[str, int]:
        codes = {"kernels": RIGHT.replace('"c1"', '"Adam on cpu, bf16"'), "a": RIGHT, "b": RIGHT}
        parts = {
            name: part(gpu, name, count(name) + (FAULTS["wrong"] if name == wrong else code))
            for name, code in codes.items()
        }
        first, *rest = parts.values()
        measured(gpu, [gpu.Phase((first,), 60), gpu.Phase(tuple(rest), 60)], tmp_path)
        return {name: len((tmp_path / name).read_text()) for name in parts}

    assert again(wrong="a") == {"kernels": 1, "a": 1, "b": 1}
    assert again(wrong="") == {"kernels": 1, "a": 2, "b": 1}


def test_without_kernels_the_rest_uses_torch_and_runs_again_with_them(
    gpu: Any, tmp_path: Path
) -> None:
    tell = RIGHT.replace('"text": ""', '"text": os.environ.get("XDS_BENCH_NATIVE", "1")')

    def native(kernels: str) -> str:
        phases = [gpu.Phase((part(gpu, n, c),), 60) for n, c in (("kernels", kernels), ("a", tell))]
        results = measured(gpu, phases, tmp_path)
        return str(results.content["parts"]["a"]["records"][0]["text"])

    assert native(FAULTS["crashes"]) == "0"
    assert native(RIGHT.replace('"c1"', '"Adam on cpu, bf16"')) == "1"


def test_what_has_no_time_does_not_run_and_the_call_ends(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that is killed takes processes of other sessions with it."""
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "each = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'],\n"
        f"                        start_new_session=True)\nopen({str(file)!r}, 'w').write(str(each.pid))\n"
        "time.sleep(600)"
    )
    phases = [gpu.Phase((part(gpu, name, code, needs=0.5),), 60) for name in ("a", "b")]
    results = measured(gpu, phases, tmp_path, seconds=1)
    pid = file.read_text() if file.exists() else "0"  # too late on a busy machine
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"
    states = {name: each["state"] for name, each in results.content["parts"].items()}
    assert states == {"a": "wrong", "b": "not run"}
    assert gpu.show(options(tmp_path), results, phases, "3 s") == 1
    assert "# NOT RUN: b" in capsys.readouterr().out


@pytest.mark.slow
def test_a_part_of_each_kind_runs_without_a_gpu(tmp_path: Path) -> None:
    # tests/rehearsal/test_benchmark_on_device.py runs "eager"
    words = ["--first", "--dry-run", "--seconds", "900", "--out", str(tmp_path)]
    words += ["--only", "kernels", "2 ranks", "checkpoints", "readme", "host time"]
    words += ["generation", "inference", "changed"]
    command = [sys.executable, str(FOLDER / "main.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) <= 60
    (file,) = tmp_path.glob("*.json")
    parts = json.loads(file.read_text())["parts"]
    assert {each["state"] for each in parts.values()} == {"right"}
