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


LOADER = "test_features.py::test_batches_of_the_engines_loader_come_on_a_stream_of_their_own"
OFFLOADED = "test_rehearsal.py::test_offloaded_training_has_the_numbers_of_the_cpu_and_no_race"
PARAMS, STATES = f"{OFFLOADED}[3-bf16-1-none-cpu-2]", f"{OFFLOADED}[2-bf16-3-cpu-none-2]"
UPDATE = (
    "test_rehearsal.py::test_an_update_is_one_launch_for_each_flat_and_two_and_hides_the_wait[2]"
)
ONE_GPU = "test_parallel.py::test_a_message_may_be_waited_for_on_another_stream"

FAULTS = [
    # -- a missing wait ------------------------------------------------------------------------------------
    Fault(
        "a unit is used before it is gathered",
        RACE,
        "zero/core/flat_params.py",
        "            handle.wait()\n            self.is_unsharded = True",
        "            self._kept = handle\n            self.is_unsharded = True",
        training(3, "bf16"),
    ),
    Fault(
        "new parameters are used before they are published",
        RACE,
        "zero/core/flat_params.py",
        "            handle.wait()\n            self.is_unsharded = True",
        "            self._kept = handle\n            self.is_unsharded = True",
        training(1, "fp32"),
    ),
    Fault(
        "sums are read before they are reduced",
        RACE,
        "zero/core/flat_grads.py",
        "        handle.wait()\n        self._local.protect()",
        "        self._kept = handle\n        self._local.protect()",
        training(2, "fp16"),
    ),
    Fault(
        "sums of stage 0 are read before they are gathered",
        RACE,
        "zero/core/flat_grads.py",
        "            handle.wait()\n            if self.home.is_on_host",
        "            self._kept = handle\n            if self.home.is_on_host",
        training(0, "bf16"),
    ),
    Fault(
        "norms of the other ranks are read before they arrive",
        RACE,
        "zero/core/reduction.py",
        "        handle.wait()\n        table[:, 0] = ",
        "        self._kept = handle\n        table[:, 0] = ",
        training(2, "fp16"),
    ),
    Fault(
        "the host reads the norm before it has arrived",
        RACE,
        "zero/core/agreement.py",
        "        event.synchronize()\n",
        "        event.query\n",
        training(0, "fp32"),
    ),
    Fault(
        "gloo sends what has not arrived on the host",
        RACE,
        "ops/comm/point_to_point.py",
        "            started.synchronize()",
        "            started.query",
        ONE_GPU,
    ),
    Fault(
        "a message overwrites what another stream still reads",
        RACE,
        "ops/comm/point_to_point.py",
        "            torch.cuda.current_stream(self.device).wait_event(started)",
        "            started.query",
        ONE_GPU,
    ),
    # -- a tensor on the wrong device ----------------------------------------------------------------------
    Fault(
        "norms are added on the host",
        DEVICE,
        "zero/core/squares.py",
        "sums = torch.zeros(size, dtype=torch.float64, device=device)",
        "sums = torch.zeros(size, dtype=torch.float64)",
        training(2, "fp16"),
    ),
    Fault(
        "a message of the host",
        DEVICE,
        "zero/core/reduction.py",
        "flag = torch.full((1,), said, dtype=torch.uint8, device=world.device)",
        "flag = torch.full((1,), said, dtype=torch.uint8)",
        training(0, "bf16"),
    ),
    Fault(
        "the factor of gradients is on the host",
        DEVICE,
        "ops/optim/scale.py",
        "torch.full((), value, dtype=torch.float32, device=device)",
        "torch.full((), value, dtype=torch.float32)",
        training(1, "fp32"),
    ),
    Fault(
        "numbers of steps are on the host",
        DEVICE,
        "ops/optim/adam.py",
        '"step": torch.zeros((), dtype=torch.float32, device=master.device)',
        '"step": torch.zeros((), dtype=torch.float32)',
        training(2, "fp16"),
    ),
    Fault(
        "gradients are collected on the host",
        DEVICE,
        "zero/core/local_sum.py",
        "            tensor = self._pool.empty(numel, dtype, device)",
        "            tensor = torch.empty(numel, dtype=dtype)",
        training(0, "fp32"),
    ),
    # -- a wait of the host --------------------------------------------------------------------------------
    Fault(
        "backward looks at the loss",
        WAIT,
        "engine/steps/training_step.py",
        "        self._report.add_loss(result)",
        "        self._report.add_loss(result) if result.item() else None",
        training(0, "bf16"),
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
        "a count reaches the device by a copy",
        WAIT,
        "zero/core/reduction.py",
        "flag = torch.full((1,), said, dtype=torch.uint8, device=world.device)",
        "flag = torch.tensor([said], dtype=torch.uint8, device=world.device)",
        training(0, "bf16"),
    ),
    Fault(
        "torch reads the tensor that is added to the numbers of steps",
        WAIT,
        "ops/optim/shard_optimizer.py",
        "torch._foreach_add_(steps, taken, alpha=1)",
        "torch._foreach_add_(steps, taken)",
        UPDATE,
    ),
    Fault(
        "each buffer's norm is read",
        WAIT,
        "zero/core/reduction.py",
        "            found.append(grads.square_sums(exact=exact))",
        "            found.append(grads.square_sums(exact=exact))\n"
        "            found[-1].sum().item()",
        training(3, "bf16"),
    ),
    # -- memory that is freed or reused in flight ----------------------------------------------------------
    Fault(
        "gradients are freed while they are sent",
        FLIGHT,
        "zero/core/flat_grads.py",
        "        self._handle = self.reducer.reduce(payload, self._total, add=adds)\n"
        "        self._local.clear()",
        "        self._handle = self.reducer.reduce(payload, self._total, add=adds)\n"
        "        self._local.give_back()",
        training(1, "fp32"),
    ),
    Fault(
        "a batch is used before its copy",
        RACE,
        "engine/data/lanes.py",
        "        computation.wait_stream(self._stream)\n",
        "",
        LOADER,
    ),
    Fault(
        "memory of a batch is free for the next copy while it is used",
        FLIGHT,
        "engine/data/lanes.py",
        "            copied.record_stream(computation)  # its memory belongs to the other stream\n",
        "            pass\n",
        LOADER,
    ),
    Fault(
        "a copy to the host does not wait for the values",
        RACE,
        "offload/lanes.py",
        "        self._stream.wait_event(mark)\n",
        "",
        STATES,
    ),
    Fault(
        "the device uses values that are still on their way from the host",
        RACE,
        "offload/lanes.py",
        "        torch.cuda.current_stream().wait_event(self._event)\n",
        "        self._event.query\n",
        PARAMS,
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
