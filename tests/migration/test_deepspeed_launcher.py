"""Tests of `deepspeed.launcher.runner.main`: a start of real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xds.engine.deepspeed import launcher as own

SCRIPT = """import os, sys
print(sys.argv[1], os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_SIZE"])
sys.exit(3 if sys.argv[1] == "fail" else 0)
"""


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


def test_main_says_that_more_variables_belong_into_a_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own, "EXPORT_ENVS", [*own.EXPORT_ENVS, "MY_"])
    monkeypatch.setattr(own, "run_command", lambda arguments: 0)
    with caplog.at_level("WARNING", "xds"):
        own.main(["train.py"])
    assert "MY_ are not forwarded" in caplog.text and ".deepspeed_env" in caplog.text
