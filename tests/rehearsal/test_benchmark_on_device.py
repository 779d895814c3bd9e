"""The GPU benchmark with tiny sizes on a CUDA device that is host memory: its lines for a GPU run once.

See site/sitecustomize.py for what each of its processes gets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stand_in
from device_ranks import skip_without_device

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parents[1] / "benchmarks" / "gpu" / "main.py"
PARTS = ("eager",)  # the dry run of test_gpu_benchmark.py has every part


@pytest.mark.slow
def test_parts_of_the_first_call(tmp_path: Path) -> None:
    skip_without_device()
    paths = [str(HERE / "site"), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "XDS_REHEARSAL": "1"}
    variables["XDS_REHEARSAL_LIBRARY"] = stand_in.compiled()  # each part has a folder of its own
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            "--first",
            "--tiny",
            "--out",
            str(tmp_path),
            "--only",
            *PARTS,
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = tmp_path.glob("*.json")
    content = json.loads(file.read_text())
    assert content["void"] == "tiny sizes" and set(content["parts"]) == set(PARTS)
    rows = {each["row"] for each in content["parts"]["eager"]["records"] if "row" in each}
    assert rows >= {"plain", "xds 0", "xds 2", "xds 3"}
