"""Measures what `import deepspeed` costs where xds stands in for it, over `import torch` alone.

    python benchmarks/stand_in/main.py

Each line of code runs in fresh processes; the figures are medians, in seconds.
Target: at most 0.3 s for the import.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

CASES = ("import deepspeed", "import deepspeed; deepspeed.initialize")
CLOCK = (
    "import torch, time; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"
)


def seconds_of(code: str) -> float:
    """Seconds that `code` takes in a fresh process that has imported torch, and in which xds stands in."""
    return float(_run(CLOCK.format(code=code), "1"))


def seconds_to_start(value: str) -> float:
    """Seconds from the start of a process until its first line, by the process's own clock."""
    code = "import time; print(time.process_time())"
    return float(_run(code, value))


def _run(code: str, value: str) -> str:
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "XDS_AS_DEEPSPEED": value, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    for code in CASES:
        seconds = statistics.median(seconds_of(code) for _ in range(rounds))
        print(f"import torch; {code}: {seconds:.3f} s after torch")
    started = [seconds_to_start("1") - seconds_to_start("") for _ in range(rounds)]
    print(
        f"start of a process with the variable over one without: {statistics.median(started):.3f} s"
    )


if __name__ == "__main__":
    main()
