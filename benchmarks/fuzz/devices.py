"""Training on a simulated device of another name against the CPU, bit for bit.

    python benchmarks/fuzz/devices.py [--ranks 1,2,4] [--only TEXT] [--without TEXT] [--every N] [--steps N]
    python benchmarks/fuzz/devices.py --random 60 [--first SEED] [--ranks 1,2,3]

The cases are those of tests/contract/same_bits.py, or random ones of tests/fuzz. The device is `xsim` of
docs/design/gpu-rehearsal.md. Exit status 1: a case differs, or fails. Processes of the CPU train several cases
one after another. Where one fails, each is tried alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS / "rehearsal"), str(TESTS / "contract"), str(TESTS)]

from device_ranks import ranks, stop_ranks  # noqa: E402
from helpers import run_new_ranks  # noqa: E402
from same_bits import cases  # noqa: E402
from test_simulated_device import drawn, other_bits  # noqa: E402


def examined(names: list[str], steps: int) -> list[str]:
    """What differs in cases of one number of ranks; a case of which nothing is said is equal."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return other_bits(names, Path(folder), steps)
        except AssertionError as error:
            if len(names) == 1:
                return [f"{names[0]}: {str(error)[-1500:]}"]
    return [text for name in names for text in examined([name], steps)]


def random_ones(seeds: list[int], world_size: int) -> list[str]:
    """The same of random cases."""
    try:
        there = ranks(world_size, device="xsim").run(drawn, seeds, world_size)
    except AssertionError as error:
        if len(seeds) == 1:
            return [f"seed {seeds[0]}: {str(error)[-1500:]}"]
        return [text for seed in seeds for text in random_ones([seed], world_size)]
    here = run_new_ranks(drawn, world_size, seeds, world_size)
    pairs = zip(zip(*there, strict=True), zip(*here, strict=True), strict=True)
    return [case[0] for case, wanted in pairs if case != wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--without", help="no case whose name has this text")
    parser.add_argument("--at-once", type=int, default=12, help="cases of the same processes")
    parser.add_argument("--every", type=int, default=1, help="each Nth of them alone")
    parser.add_argument("--steps", type=int, default=5, help="steps (default: %(default)s)")
    parser.add_argument("--random", type=int, default=0, help="so many random cases instead")
    parser.add_argument("--first", type=int, default=0, help="the first seed of these")
    given = parser.parse_args()
    wanted = [int(number) for number in given.ranks.split(",")]
    if given.random:
        seeds = [*range(given.first, given.first + given.random)]
        said = [
            text
            for number in wanted
            for start in range(0, len(seeds), given.at_once)
            for text in random_ones(seeds[start : start + given.at_once], number)
        ]
        stop_ranks()
        print("\n".join([*said, f"{len(said)} of {len(wanted) * len(seeds)} cases differ"]))
        return int(bool(said))
    names = [
        name
        for name, (number, _) in cases().items()
        if number in wanted and given.only in name and not (given.without and given.without in name)
    ]
    names = names[:: given.every]
    num_wrong = 0
    for number in wanted:
        own = [name for name in names if cases()[name][0] == number]
        for start in range(0, len(own), given.at_once):
            chunk = own[start : start + given.at_once]
            said = examined(chunk, given.steps)
            num_wrong += len(said)
            ends = chunk[0] if len(chunk) == 1 else f"{chunk[0]} to {chunk[-1]}"
            print("\n".join(said or [f"{ends}: {len(chunk)} equal"]), flush=True)
    stop_ranks()
    print(f"{len(names) - num_wrong} of {len(names)} cases have the bits of the CPU")
    return int(num_wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
