"""Faults that would be wrong on a GPU and nowhere else, each one change to a copy of the code.

The tests of the engine on a CPU pass with them. A test of the rehearsal must fail, for the reason of its kind.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests/rehearsal"
SKIPPED = (".git", "docs", "benchmarks", "examples", "runs", "*.egg-info", "__pycache__", ".*cache")

# what the rehearsal says: a race, memory in flight, a tensor of the host, a wait too many
RACE = r"without waiting|NaN to integer|, nan"
FLIGHT = r"is freed on stream|writes what stream \d+ still reads|while the copy is in flight"
DEVICE = (
    r"on the same device|No backend type associated with device type cpu|in_micro_batches|in_steps"
)
WAIT = r"in_micro_batches|in_steps|num_waits|sync event"


@dataclass(frozen=True)
class Fault:
    """Replace `old` by `new` in `file`; `test` must fail and say `says`."""

    name: str
    says: str
    file: str
    old: str
    new: str
    test: str


def training(stage: int, precision: str) -> str:
    """A test of training."""
    name = "test_training_has_the_numbers_of_the_cpu_and_no_race"
    return f"test_rehearsal.py::{name}[{stage}-{precision}]"


STATES = (
    "test_rehearsal.py::test_offloaded_training_has_the_numbers_of_the_cpu_and_no_race"
    "[2-bf16-3-cpu-none-2]"
)

FAULTS = [
    Fault(
        "a unit is used before it is gathered",
        RACE,
        "zero/core/param_bucket.py",
        "            handle.wait()\n            self._become(ShardState.UNSHARDED)",
        "            self._kept = handle\n            self._become(ShardState.UNSHARDED)",
        training(3, "bf16"),
    ),
    Fault(
        "the host reads the norm before it has arrived",
        RACE,
        "zero/core/reduction.py",
        "        event.synchronize()\n",
        "        event.query\n",
        training(0, "fp32"),
    ),
    Fault(
        "norms are added on the host",
        DEVICE,
        "zero/core/reduced_sum.py",
        "squares = torch.zeros(self._ranks.world_size, dtype=torch.float64, device=device)",
        "squares = torch.zeros(self._ranks.world_size, dtype=torch.float64)",
        training(2, "fp16"),
    ),
    Fault(
        "a hook looks at a gradient",
        WAIT,
        "zero/core/local_sum.py",
        "            if grad.layout != torch.strided:",
        "            if grad.layout != torch.strided or not bool(grad.any()):",
        training(1, "fp32"),
    ),
    Fault(
        "gradients are freed while they are sent",
        FLIGHT,
        "zero/core/reduced_sum.py",
        "        self._send(local, self._reduced, adds=adds)\n        self._local.mark_empty()",
        "        self._send(local, self._reduced, adds=adds)\n        self._local.free()",
        training(1, "fp32"),
    ),
    Fault(
        "a copy to the host does not wait for the values",
        RACE,
        "offload/job_queues.py",
        "        self._stream.wait_event(mark)\n",
        "",
        STATES,
    ),
]


def copied(folder: Path, fault: Fault) -> Path:
    """A copy of the code with the fault, at `folder`/xds."""
    root = folder / "xds"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*SKIPPED), symlinks=True)
    path = root / fault.file
    text = path.read_text()
    count = text.count(fault.old)
    assert count == 1, f"{fault.file} has the text of {fault.name!r} {count} times"
    path.write_text(text.replace(fault.old, fault.new))
    return root


def report_of(folder: Path, fault: Fault) -> tuple[bool, str]:
    """Whether the rehearsal found the fault, and the end of what it printed."""
    root = copied(folder, fault)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    words = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n0",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*words, f"{root}/{HERE}/{fault.test}"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    failed = done.returncode == 1 and " 1 failed" in " " + done.stdout.splitlines()[-1]
    return failed and re.search(fault.says, done.stdout) is not None, done.stdout[-4000:]
