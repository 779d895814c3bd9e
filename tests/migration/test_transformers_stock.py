"""Stock transformers on two ranks by `xds --as-deepspeed`: what its own tests of DeepSpeed ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SCRIPT = Path(__file__).parent / "scripts" / "transformers_stock.py"


@pytest.mark.contract
@pytest.mark.slow
def test_stock_transformers_builds_trains_saves_and_resumes(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2", "--as-deepspeed"]
    done = subprocess.run(
        [*start, str(SCRIPT), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["dtypes"] == ["torch.bfloat16"]  # as the config says, from construction on
    assert found["resized"] == [70, 8]
    assert found["head"] == [[-100.0], [100.0]]  # drawn by the model, for weights that no file has
    assert found["again"] == found["losses"] and len(found["losses"]) == 4
    assert found["apart"] == 0  # model.safetensors has the rounded values of the fp32 weights
    # each of the two Trainers says who trains, on rank 0, in transformers' own log level too
    assert done.stdout.count("stands in for deepspeed; stage 3, 2 ranks, bf16\n") == 2
    assert done.stdout.count("DeepSpeed info: version=0.19.8+xds; xds ") == 2
