"""Tests of whole runs of examples/pipeline with a tiny model on four ranks."""

from __future__ import annotations

import csv
from pathlib import Path

from script_runs import run_script
from warm_ranks import warm

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "pipeline"
TINY = "--layers 4 --width 32 --heads 2 --context 16 --validate-every 2 --save-every 2"


def options(folder: Path, config: str, steps: int) -> list[str]:
    text = folder / "text.py"
    text.write_text((ROOT / "examples" / "gpt" / "train.py").read_text() * 3)
    chosen = f"--config {EXAMPLE / config} --steps {steps} --checkpoints saved --data {text}"
    return [*TINY.split(), *chosen.split()]


def curve(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs" / "pipeline" / "loss.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_trains_validates_saves_and_resumes_with_another_schedule_and_stage(tmp_path: Path) -> None:
    script = str(EXAMPLE / "train.py")
    for config, steps in (("pipeline.json", 4), ("zero_bubble.json", 6)):
        warm(4).run(run_script, script, str(tmp_path), *options(tmp_path, config, steps))
        assert (tmp_path / "saved" / "latest").read_text() == f"global_step{steps}"
    rows = curve(tmp_path)
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [row["validation_loss"] != "" for row in rows] == [False, True] * 3
    # 256 bytes, little learned yet: ln(256) = 5.55
    assert all(5.0 < float(row["loss"]) < 6.0 for row in rows)
    assert all(float(row["gradient_norm"]) > 0 for row in rows)


def test_the_readme_has_the_line_that_starts_it() -> None:
    config = "examples/pipeline/pipeline.json"
    line = f"xds --nproc-per-node 4 examples/pipeline/train.py --config {config}"
    assert line in (ROOT / "README.md").read_text()
