"""benchmarks/comm: its results are right on small buffers, and its rows are medians over runs."""

import argparse
import importlib.util
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


def test_a_row_is_the_median_over_runs(monkeypatch):
    module = loaded()
    runs = [
        {"reduce_scatter, memory": [a, a, 9.0], "copy": [1.0, 1.0, 1.0]} for a in (0.5, 0.6, 0.8)
    ]
    row = module.ratio("of a test", runs, ("reduce_scatter, memory", "copy"), must=0.75, aim=0.6)
    assert (row.value, row.low, row.high) == (0.6, 0.5, 0.8) and row.verdict == "met (aim)"
    assert row.samples == {"runs": [0.5, 0.6, 0.8]} and "3 runs" in row.note


@pytest.mark.slow
def test_the_command_prints_every_target(capsys):
    module = loaded()
    args = argparse.Namespace(runs=1, turns=1, quiet_minutes=0.0)
    rows = [row for part in module.PARTS.values() for row in part(args)]
    bars = [row.must for row in rows if row.must is not None]
    assert bars == [0.75, 0.65, 0.5, 0.5] + [20.0] * 4
    assert all(row.value > 0 for row in rows)
