"""Dry runs of benchmarks/gpu: every section runs on a CPU, keeps its deadline and writes its file.

What it reads in a profile is tested on events of the form that CUDA's have.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu" / "main.py"


def dry(out: Path, *options: str) -> tuple[str, dict[str, dict[str, object]]]:
    """The output, and the rows of all files by name."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry-run", "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "TMPDIR": str(out)},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    files = [
        json.loads(file.read_text()) for file in out.glob("*.json") if ".trace." not in file.name
    ]
    assert all(file["no_results"] == "dry run" and file["versions"]["torch"] for file in files)
    return done.stdout, {row["name"]: row for file in files for row in file["rows"]}


def reasons(rows: dict[str, dict[str, object]]) -> set[object]:
    """Why rows were not measured."""
    return {row["note"] for row in rows.values() if row["value"] is None}


@pytest.mark.slow
def test_a_section_runs_without_a_gpu(tmp_path: Path) -> None:
    text, rows = dry(tmp_path, "--trace")
    assert rows["350M stage 3: launches of the update"]["value"]
    assert not reasons(rows)
    assert "# dry run, no results: 8 rows ran" in text
    assert "met" not in text and "For benchmarks" not in text


@pytest.mark.slow
@pytest.mark.parametrize("section", ["tests", "ops", "train", "memory", "ranks", "checkpoints"])
def test_every_section_runs_without_a_gpu(section: str, tmp_path: Path) -> None:
    _, rows = dry(tmp_path, f"--{section}")
    allowed = {
        "tests": set(),
        "ops": {"dry run"},
        "train": {"no --deepspeed FOLDER"},
        "ranks": {"the trace has no NCCL kernels"},
    }
    assert reasons(rows) <= allowed.get(section, set())
    assert {row["verdict"] for row in rows.values()} <= {"dry run", "not measured"}


@pytest.mark.slow
def test_a_deepspeed_that_fails_leaves_the_other_rows(tmp_path: Path) -> None:
    package = tmp_path / "peer" / "deepspeed"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text(
        "import os, sys\n"
        "def initialize(config, **_):\n"
        "    print('no end of line', end='', flush=True)\n"
        "    if config['zero_optimization']['stage'] == 2:\n"
        "        raise ImportError('an op is missing')\n"
        "    sys.stderr.write('\\nout of luck')\n"
        "    os._exit(3)\n"
    )
    options = ["--against", "deepspeed", "--deepspeed", str(package.parent)]
    _, rows = dry(tmp_path / "out", "--train", "--models", "350M", *options)
    assert reasons(rows) == {
        "ImportError: an op is missing",
        "the process ended: out of luck",
    }
    assert rows["350M stage 0: launches of the update"]["value"]


@pytest.mark.slow
def test_a_section_ends_in_time(tmp_path: Path) -> None:
    _, rows = dry(tmp_path, "--train", "--minutes", "0.1")
    assert any(str(reason).startswith("time") for reason in reasons(rows))


# -- profiles ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiles() -> Any:
    spec = importlib.util.spec_from_file_location("profile_step", SCRIPT.parent / "profile_step.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def event(cat: str, name: str, ts: float, dur: float, number: int | None = None) -> dict[str, Any]:
    args = {} if number is None else {"correlation": number, "External id": 7}
    found = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur}
    return found | {"args": args}


def kernel(ts: float, dur: float, number: int = 0, name: str = "void adam<float>(int)") -> Any:
    return event("kernel", name, ts, dur, number)


UPDATE = event("user_annotation", "bench_update", 500, 100)
TRACE = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    event("user_annotation", "bench_step", 0, 900),
    UPDATE,
    event("gpu_user_annotation", "bench_update", 690, 300),
    event("cuda_runtime", "cudaLaunchKernel", 450, 5, 1),  # before the range, and runs inside it
    kernel(510, 20, 1, "norm"),
    event("cuda_runtime", "cudaLaunchKernel", 510, 30, 2),  # calls the driver
    event("cuda_driver", "cuLaunchKernel", 515, 20, 2),
    {"ph": "s", "id": 2, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 510, "bp": "e"},
    kernel(700, 50, 2),
    event("cuda_driver", "cuLaunchKernelEx", 545, 5, 3),  # as Triton's kernels
    kernel(750, 50, 3, "triton_poi"),
    event("cuda_runtime", "cudaMemcpyAsync", 555, 5, 4),  # no kernel
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 810, 10, 4),
    event("cuda_runtime", "cudaLaunchKernelExC", 565, 5, 5),
    kernel(830, 50, 5),
    event("cuda_runtime", "cudaEventSynchronize", 570, 29, 6),
    event("cuda_runtime", "cudaLaunchKernel", 601, 5, 7),  # after the range
    kernel(900, 20, 7, "fill"),
]


def test_a_profile_counts_the_kernels_that_the_update_launches(profiles: Any) -> None:
    found = profiles.figures(TRACE, True)
    assert found["launches"] == 3
    assert found["names"] == ["triton_poi", "void adam<float>(int)"]
    assert found["kernels"] == 6
    assert found["device"] == pytest.approx(410e-6)
    assert found["idle"] == pytest.approx((170 + 10 + 10 + 20) * 1e-6)
    assert found["largest_gap"] == pytest.approx(170e-6)


CALL = event("cuda_runtime", "cudaLaunchKernel", 510, 1, 1)


@pytest.mark.parametrize(
    ("spans", "idle", "largest"),
    [
        ([(0, 10)], 0, 0),
        ([(0, 10), (10, 5)], 0, 0),
        ([(0, 10), (5, 10), (20, 1)], 5, 5),  # they overlap on two streams
        ([(0, 100), (10, 5), (30, 5), (110, 1)], 10, 10),  # nested
        ([(50, 1), (0, 10), (20, 10)], 30, 20),  # in no order
    ],
)
def test_gaps_are_times_without_any_kernel(
    spans: list[tuple[int, int]], idle: int, largest: int, profiles: Any
) -> None:
    found = profiles.figures([UPDATE, CALL, *(kernel(*span, 1) for span in spans)], True)
    assert found["idle"] == pytest.approx(idle * 1e-6)
    assert found["largest_gap"] == pytest.approx(largest * 1e-6)


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([CALL, kernel(0, 1, 1)], "no range bench_update"),
        ([event("gpu_user_annotation", "bench_update", 0, 9)], "no range bench_update"),
        ([UPDATE, CALL], "no kernel that bench_update launched"),  # the kernels were not recorded
        ([UPDATE, kernel(510, 5)], "no kernel that bench_update launched"),
    ],
)
def test_a_profile_that_lacks_something_is_no_figure(
    events: list[dict[str, Any]], says: str, profiles: Any
) -> None:
    with pytest.raises(RuntimeError, match=says):
        profiles.figures(events, True)


@pytest.mark.parametrize(
    ("sent", "others", "share"),
    [
        ([], [(0, 10)], None),
        ([(0, 10)], [], 0.0),
        ([(0, 10)], [(0, 10)], 1.0),
        ([(0, 10)], [(20, 10)], 0.0),
        ([(0, 10)], [(8, 4)], 0.2),
        ([(0, 10), (5, 10)], [(0, 10)], 0.75),  # two groups at once: each message counts
        ([(0, 10)], [(0, 6), (4, 2), (5, 3)], 0.8),  # kernels of two streams count once
        ([(0, 10)], [(-5, 30)], 1.0),
        ([(0, 10)], [(2, 1), (5, 1), (10, 5)], 0.2),
    ],
)
def test_messages_are_hidden_while_other_kernels_run(
    sent: list[tuple[int, int]],
    others: list[tuple[int, int]],
    share: float | None,
    profiles: Any,
) -> None:
    name = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [kernel(*span, name=name) for span in sent]
    events += [kernel(*span, name="gemm") for span in others]
    events += [event("gpu_user_annotation", "nccl:_all_gather_base", 0, 100)]
    events += [event("gpu_memcpy", "Memcpy HtoD", 0, 100), event("cpu_op", "aten::mm", 0, 100)]
    assert profiles.hidden_share(events) == (None if share is None else pytest.approx(share))


def test_a_trace_may_have_names_that_json_does_not_allow(profiles: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(b'{"traceEvents": [{"name": "a\tb\xff"}]}')
    assert profiles.events_of(file)[0]["name"].startswith("a\tb")
