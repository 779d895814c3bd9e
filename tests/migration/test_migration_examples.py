"""The three scripts of docs/migration.md, started on two ranks by `xds --as-deepspeed`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "migration"
START = [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_loop_of_the_guide_runs_by_the_command_alone(tmp_path: Path) -> None:
    args = ["--deepspeed_config", str(FOLDER / "loop.json")]
    printed = run([*START, "--as-deepspeed", str(FOLDER / "loop.py"), *args], tmp_path)
    assert "stands in for deepspeed; stage 3, 2 ranks, fp32" in printed
    assert "loss " in printed.splitlines()[-1]


@pytest.mark.parametrize("script", ["loop.py", "trainer.py", "accelerated.py"])
def test_no_script_of_the_guide_imports_xds(script: str) -> None:
    lines = (FOLDER / script).read_text().splitlines()
    assert not [line for line in lines if "import" in line and "xds" in line]


def run(command: list[str], folder: Path) -> str:
    """What the command prints."""
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


ABORTED = 134


@cache
def loss_of_ddp(script: str) -> str:
    """The last line of the script on plain DDP, without xds in its ranks.

    There torch 2.13 sometimes aborts a rank after Python has ended (no Python frame, "terminate called
    without an active exception"): the loss has been printed by then.
    """
    environment = {**ENVIRONMENT, "ACCELERATE_USE_CPU": "1"}
    command = [*START, str(FOLDER / script)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    last = (done.stdout.splitlines() or [""])[-1]
    assert done.returncode in (0, ABORTED) and last.startswith("loss "), done.stderr
    return last


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares with DDP on CPUs")
@pytest.mark.parametrize(("script", "stage"), [("trainer.py", 3), ("accelerated.py", 1)])
def test_a_stock_script_gives_the_loss_of_ddp(script: str, stage: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    config = json.loads((FOLDER / "zero3.json").read_text())
    config["zero_optimization"]["stage"] = stage
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ["--deepspeed", "config.json"] if script == "trainer.py" else ["--stage", str(stage)]
    ours = run([*START, "--as-deepspeed", str(FOLDER / script), *args], tmp_path)
    assert f"stands in for deepspeed; stage {stage}, 2 ranks, fp32" in ours
    assert ours.splitlines()[-1] == loss_of_ddp(script)


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares with DDP on CPUs")
def test_stock_accelerate_shards_gradients_with_the_loss_of_ddp(tmp_path: Path) -> None:
    test_a_stock_script_gives_the_loss_of_ddp("accelerated.py", 2, tmp_path)
