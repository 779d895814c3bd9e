"""Tests of whole runs of examples/3d with a tiny model."""

from __future__ import annotations

from pathlib import Path

from script_runs import run_script
from warm_ranks import warm

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "3d"
TINY = "--layers 4 --width 32 --heads 4 --context 16 --checkpoints saved --save-every 2"


def test_trains_saves_and_resumes(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text((ROOT / "examples" / "gpt" / "train.py").read_text() * 3)
    for steps in (2, 4):
        options = [*TINY.split(), "--data", str(text), "--steps", str(steps)]
        warm(4).run(run_script, str(EXAMPLE / "train.py"), str(tmp_path), *options)
        assert (tmp_path / "saved" / "latest").read_text() == f"global_step{steps}"
