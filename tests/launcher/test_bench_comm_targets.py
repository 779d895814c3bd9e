"""benchmarks/comm: its results are right on small buffers, and its rows are medians over runs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import run_ranks

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def loaded():
    """benchmarks/comm/main.py as a module; it leaves sys.path as it was."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("comm_targets", FOLDER / "comm" / "main.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def turns_on_a_rank():
    import torch.distributed as dist

    module = loaded()
    module.LARGE_BYTES, module.CALLS, module.SMALL_TURNS = 1 << 18, 2, 1
    rank = dist.get_rank()
    return module.large(rank, 2, 2), module.small(rank, 2, 2)


def test_every_way_has_its_turns():
    for large, small in run_ranks(turns_on_a_rank, 2):
        assert {"copy", "copy of one rank", "reduce_scatter, memory"} < large.keys()
        assert {"message, memory", "message, messages", "sum, memory"} < small.keys()
        assert all(len(each) == 2 for each in (*large.values(), *small.values()))


def test_a_row_is_the_median_over_runs():
    module = loaded()
    runs = [
        {"reduce_scatter, memory": [a, a, 9.0], "copy": [1.0, 1.0, 1.0]} for a in (0.5, 0.6, 0.8)
    ]
    row = module.ratio("of a test", runs, ("reduce_scatter, memory", "copy"), must=0.75, aim=0.6)
    assert (row.value, row.low, row.high) == (0.6, 0.5, 0.8) and row.verdict == "met (aim)"
    assert row.samples == {"runs": [0.5, 0.6, 0.8]} and "3 runs" in row.note


@pytest.mark.slow
def test_the_command_prints_every_target():
    """It exits with 1 where a target is missed, as on a busy machine."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "comm" / "main.py"), "--quick"],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode in (0, 1), done.stderr
    rows = [line for line in done.stdout.splitlines() if " ranks: " in line]
    assert len(rows) == 14 and all("1 runs" in row for row in rows)
    assert sum(row.count(" met") + row.count("target missed") for row in rows) == 8
