"""A short run of examples/huggingface on two ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "huggingface" / "train.py"

# the examples import the files beside them, which -P and PYTHONSAFEPATH forbid
ENV = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_trains_and_samples(architecture: str, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text(EXAMPLE.read_text() * 3)
    launch = [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2", str(EXAMPLE)]
    options = f"--architecture {architecture} --context 16 --steps 3 --sample 4 --data {text}"
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
