"""Tests of `deepspeed.launcher`: command lines, hosts and slots, commands, and a start of real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import xds
from xds.deepspeed.launcher import runner

SCRIPT = """import os, sys
print(sys.argv[1], os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_SIZE"])
sys.exit(3 if sys.argv[1] == "fail" else 0)
"""
POOL = {"a": 4, "b": 4}


def test_hosts_and_slots_are_chosen_as_in_deepspeed() -> None:
    choose = runner.parse_inclusion_exclusion
    assert choose(POOL, "b@a:2,0,2", "") == {"a": [0, 2], "b": [0, 1, 2, 3]}
    assert choose(POOL, "", "a@b:1") == {"b": [0, 2, 3]}
    assert choose(POOL, "", "a@b") == {}


@pytest.mark.parametrize(
    "include, exclude, said",
    [
        ("a", "b", "mutually exclusive"),
        ("c", "", "Hostname 'c' not found.*it has a, b"),
        ("a:4", "", "No slot '4' specified on host 'a'"),
        ("", "a@b:1@5", "'5' not found"),
        ("a:x", "", "with numbers"),
    ],
)
def test_an_unknown_host_or_slot_is_a_value_error(include: str, exclude: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        runner.parse_inclusion_exclusion(POOL, include, exclude)
    assert isinstance(caught.value, xds.UsageError)


def test_a_hostfile_is_read_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("\n# mine\n  worker-1 slots=2\n10.0.0.1 slots=8 # big\n")
    assert runner.fetch_hostfile(str(path)) == {"worker-1": 2, "10.0.0.1": 8}
    assert runner.fetch_hostfile(str(tmp_path / "absent")) is None
    for text in ("a slots=1\na slots=2", "a", "this is bad slots=1", ""):
        with pytest.raises(ValueError, match="hostfile"):
            path.write_text(text)
            runner.fetch_hostfile(str(path))


def start(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"xds.deepspeed.launcher.{module}", *words]
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_main_starts_ranks_and_returns_their_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = start("runner", "--num_gpus", "2", str(script), """I'm "here" """)
    assert done.returncode == 0, done.stderr
    assert """I'm "here"  0 2 2""" in done.stdout
    assert start("runner", "--num_gpus", "1", str(script), "fail").returncode == 3
