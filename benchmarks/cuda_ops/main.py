"""Time the CUDA ops of xds against the copy rate, torch and DeepSpeed; without a GPU, compile them.

    python benchmarks/cuda_ops/main.py [--minutes 8] [--quick] [--only ops|candidates]

Contestants alternate on one device. A row is the median of the ratios of times in one round: below 1 is
faster. Values that cannot be measured are marked so; none is estimated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
ARCHS = "XDS_CUDA_ARCHS"

import torch  # noqa: E402
from harness import Row, print_rows, save  # noqa: E402


def compile_rows() -> Iterator[Row]:
    """Every CUDA source for sm_80 and sm_90: seconds, and the most registers and spills of its kernels."""
    os.environ.setdefault(ARCHS, "80 90")
    from xds.ops import libraries
    from xds.ops.build import build_cache
    from xds.ops.build.plan import plan

    for library in libraries.LIBRARIES.values():
        if library.device != "cuda":
            continue
        try:
            commands = plan(library, build_cache.default_folder()).objects
        except libraries.BuildError as error:
            yield Row(f"compile {library.name}", void="SKIP", note=error.what)
            continue
        for name, command in commands.items():
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                start = time.perf_counter()
                done = subprocess.run(
                    [*command, "-Xptxas", "-v"], cwd=folder, capture_output=True, text=True
                )
                seconds = time.perf_counter() - start
            row = Row(
                f"compile {library.name}/{name}", seconds, unit=" s", note=_resources(done.stderr)
            )
            row.void = "" if done.returncode == 0 else "FAIL"
            yield row


def _resources(log: str) -> str:
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", log)]
    spills = [int(found) for found in re.findall(r"(\d+) bytes spill stores", log)]
    if not registers:
        return log.strip().splitlines()[-1][:90] if log.strip() else "no report"
    return (
        f"{len(registers)} kernels, {min(registers)} to {max(registers)} registers, "
        f"at most {max(spills)} bytes spilled"
    )


def not_measured() -> Iterator[Row]:
    import candidates
    import flat_ops

    for name, must in flat_ops.ROWS:
        yield Row(name, must=must, void="not measured")
    for name in candidates.names():
        yield Row(name, void="not measured")


def gpu() -> dict[str, Any]:
    """The device and its software versions."""
    about = torch.cuda.get_device_properties(0)
    return {
        "name": about.name,
        "compute_capability": f"{about.major}.{about.minor}",
        "memory_gib": round(about.total_memory / 2**30, 1),
        "multiprocessors": about.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def measured_rows(minutes: float, only: str, *, quick: bool) -> Iterator[Row]:
    about = gpu()
    os.environ.setdefault(ARCHS, about["compute_capability"].replace(".", ""))
    deadline = time.monotonic() + 60 * minutes
    import candidates
    import flat_ops
    from clock import Clock

    from xds.ops import libraries

    for name in ("cuda_optimizers", "cuda_quantize"):
        start = time.perf_counter()
        libraries.load(name, require=True)
        yield Row(
            f"load {name}", time.perf_counter() - start, unit=" s", note="built if not cached"
        )
    clock = Clock(deadline, rounds=3 if quick else 11)
    if only in ("", "ops"):
        yield from flat_ops.rows(clock)
    if only in ("", "candidates"):
        yield from candidates.rows(clock)
    note = f"{about['name']}, torch {torch.__version__}, CUDA {about['cuda']}"
    yield Row("copy, read + written", clock.gb_per_second, unit=" GB/s", note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="no further rows after these")
    parser.add_argument("--quick", action="store_true", help="three rounds a row, keeps nothing")
    parser.add_argument("--only", choices=("ops", "candidates"), default="")
    options = parser.parse_args()
    if torch.cuda.is_available():
        rows = list(measured_rows(options.minutes, options.only, quick=options.quick))
        extra: dict[str, Any] = {"gpu": gpu()}
    else:
        print("No CUDA device: every CUDA source is compiled, no figure is measured.", flush=True)
        rows = [*compile_rows(), *not_measured()]
        extra = {"gpu": None}
    print_rows(rows)
    # a run without a GPU does not replace measured figures with "not measured"
    results = (HERE / "results").glob("*.json")
    is_measured = any(json.loads(path.read_text()).get("gpu") for path in results)
    if not options.quick and (extra["gpu"] or not is_measured):
        print(f"kept in {save(HERE, rows, extra)}")


if __name__ == "__main__":
    main()
