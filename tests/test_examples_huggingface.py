"""A short run of examples/huggingface on two ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "huggingface" / "train.py"
TRAINER = EXAMPLE.with_name("trainer.py")

# the examples import the files beside them, which -P and PYTHONSAFEPATH forbid
ENV = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.slow
def test_trains_and_samples(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text(EXAMPLE.read_text() * 3)
    launch = [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2", str(EXAMPLE)]
    options = f"--architecture llama --context 16 --steps 3 --sample 4 --data {text}"
    done = subprocess.run(
        [*launch, *options.split()],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step     3: loss 5." in done.stdout + done.stderr
    assert "\ndef " in done.stdout


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")),
    reason="transformers and accelerate are not installed",
)
@pytest.mark.slow
def test_the_trainer_trains_evaluates_saves_resumes_and_generates(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text(EXAMPLE.read_text() * 3)
    launch = [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2"]
    launch += ["--as-deepspeed", str(TRAINER)]
    options = f"--context 16 --data {text} --eval_steps 2 --save_steps 2 --disable_tqdm true"
    options += f" --gradient_accumulation_steps 2 --output_dir {tmp_path / 'out'}"

    def run(more: str) -> str:
        done = subprocess.run(
            [*launch, *options.split(), *more.split()],
            cwd=tmp_path,
            env={**ENV, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    whole = run("--max_steps 4")
    assert "step 2: eval loss 5." in whole and "\ndef " in whole
    resumed = run(f"--max_steps 4 --resume_from_checkpoint {tmp_path / 'out' / 'checkpoint-2'}")
    assert "step 2:" not in resumed
    for told in ("step 4: eval loss", "def "):
        (one,), (two,) = (
            [line for line in output.splitlines() if line.startswith(told)]
            for output in (whole, resumed)
        )
        assert one == two
    assert (tmp_path / "out" / "model.safetensors").is_file()
