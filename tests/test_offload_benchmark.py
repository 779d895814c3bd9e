"""Tests: the quick parts of benchmarks/offload, and a dry run of its measurements on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from thinned import RUNS_ALL

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "offload"


def load(name: str) -> ModuleType:
    """A file of the benchmark that imports the standard library alone."""
    spec = importlib.util.spec_from_file_location(f"offload_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(*options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and every row by its name."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
    }
    done = subprocess.run(
        [sys.executable, str(FOLDER / "main.py"), "--json", *options],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode in (0, 1), done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr
    return done.returncode, {row["name"]: row for row in found}


@pytest.mark.slow
def test_the_bytes_are_exact_and_the_rest_needs_a_gpu() -> None:
    code, rows = rows_of("--quick", "--parts", "bytes")
    assert code == 0
    measured = {name: row for name, row in rows.items() if row["value"] is not None}
    assert {row["verdict"] for row in measured.values()} == {"met"}
    assert measured["bytes both ways in a step, stage 2, 4 micro-batches"]["value"] == 10
    others = [row for row in rows.values() if row["value"] is None]
    assert len(others) > 50
    assert {(row["verdict"], row["note"]) for row in others} == {("not measured", "no GPU")}


def test_the_search_finds_the_largest_size() -> None:
    search = load("search")
    for limit in (1, 17, 36, 39, 40, 41, 46, 90):
        tried: dict[int, bool] = {}
        while (layers := search.next_layers(tried, 40, 100)) is not None:
            assert layers not in tried
            tried[layers] = layers <= limit
        assert max(layers for layers, trains in tried.items() if trains) == limit
        assert len(tried) <= (7 if 36 <= limit <= 46 else 11)
    assert search.next_layers({1: False}, 1, 100) is None


def test_states_are_divided_between_the_places() -> None:
    search = load("search")
    room = search.Room(device=130e9, host=125e9, disk=40e9)
    for places in (search.HOST, search.DISK):
        numel = 1_000_000_000 * search.estimate(lambda n: n * 10**9, places, room, 100)
        share, fits = places.share(numel, room)
        assert fits
        assert numel * (places.device + places.device_states * (1 - share)) <= room.device
        assert numel * (places.host + places.host_states * share) <= room.host
        assert numel * places.disk_states * share <= room.disk
        assert not places.share(numel + 10**9, room)[1]


def test_the_bound_is_the_longest_part() -> None:
    roofline = load("roofline")
    ceilings = roofline.Ceilings(to_host=50e9, to_device=25e9, adam=5e9, matmul=1e15)
    found = roofline.bound(10**10, roofline.Compute(0.5, 1.0), ceilings, params_on_host=True)
    assert (found.compute, found.copies, found.updates) == (1.5, 1.6, 2.0)
    assert (found.least, found.wait) == (2.0, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["--ceilings", *(["--steps"] if RUNS_ALL else []), "--largest"])
def test_every_line_for_a_gpu_runs_on_a_cpu(what: str, tmp_path: Path) -> None:
    _, rows = rows_of(what, "--dry-run-on-cpu", "--disk", str(tmp_path))
    missing = {name: row for name, row in rows.items() if row["value"] is None}
    if what == "--largest":
        missing.pop("largest GPT, device, host and disk", None)
        _, rows = rows_of(what, "--dry-run-on-cpu")
        assert rows["largest GPT, device and host"]["value"] > 0
    reasons = {row["note"] for row in missing.values()}
    assert reasons <= {"deepspeed is not installed"}


@pytest.mark.slow
def test_measurements_end_in_time() -> None:
    _, rows = rows_of("--steps", "--dry-run-on-cpu", "--minutes", "0.02")
    assert {row["note"] for row in rows.values()} <= {"time", "deepspeed is not installed"}


@pytest.mark.slow
def test_some_cases_are_equal() -> None:
    code, rows = rows_of("--quick", "--parts", "bits")
    assert code == 0
    assert rows["equal cases, 2 ranks, ratio 1, super_offload"]["value"] == 5
