"""Short versions of benchmarks/pipeline: they run, their losses agree, and what is not a time is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "pipeline"


def quick(script: str, *options: str) -> list[str]:
    """The rows that the short version of `script` prints."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), "--quick", *options],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if " pipe " in line or line[:6] in ROWS]
    assert not any(word in row for row in rows for word in ("FAIL", "VOID")), done.stdout
    return list({row.split("  ")[0]: row for row in rows}.values())  # some are printed twice


ROWS = ("bubble", "waitin", "step, ")


@pytest.mark.slow
def test_each_schedule_of_sleeping_stages_has_its_micro_batches_in_flight() -> None:
    assert len(quick("bubble.py", "--steps", "1")) == 7


@pytest.mark.slow
def test_a_step_has_the_loss_of_torch_s_pipeline() -> None:
    assert len(quick("step.py")) == 1


@pytest.mark.slow
def test_model_states_are_those_of_the_formula_and_building_holds_one_layer_more() -> None:
    pytest.importorskip("safetensors")
    rows = quick("memory.py")
    assert len(rows) == 18
    states = [row for row in rows if row.startswith(("states", "within"))]
    assert len(states) == 16 and not any("target missed" in row for row in states)
    specs = [row for row in rows if row.startswith("building from LayerSpec, fp32")]
    assert len(specs) == 1 and "target missed" not in specs[0]
