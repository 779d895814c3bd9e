"""Training on a simulated device of another name against the CPU, bit for bit.

    python benchmarks/fuzz/devices.py [--ranks 1,2,4] [--only TEXT] [--every N] [--steps N]

The cases are those of tests/contract/same_bits.py, the device is `xsim` of docs/design/gpu-rehearsal.md. Exit
status 1: a case differs, or fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS / "rehearsal"), str(TESTS / "contract"), str(TESTS)]

from device_ranks import stop_ranks  # noqa: E402
from same_bits import cases  # noqa: E402
from test_simulated_device import other_bits  # noqa: E402


def examined(name: str, steps: int) -> str:
    """What differs; "" is nothing."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return "; ".join(other_bits([name], Path(folder), steps))
        except AssertionError as error:
            return str(error)[-1500:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--every", type=int, default=1, help="each Nth of them alone")
    parser.add_argument("--steps", type=int, default=5, help="steps (default: %(default)s)")
    given = parser.parse_args()
    wanted = [int(number) for number in given.ranks.split(",")]
    names = [
        name for name, (number, _) in cases().items() if number in wanted and given.only in name
    ]
    names = names[:: given.every]
    num_wrong = 0
    for name in names:
        said = examined(name, given.steps)
        num_wrong += bool(said)
        print(f"{name}: {said or 'equal'}", flush=True)
    stop_ranks()
    print(f"{len(names) - num_wrong} of {len(names)} cases have the bits of the CPU")
    return int(num_wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
