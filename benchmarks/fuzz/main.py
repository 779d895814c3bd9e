"""Train random models with random configs in xds and in plain PyTorch, and compare the results.

python benchmarks/fuzz/main.py --cases 2000 --seed 0 --ranks 1,2,3
python benchmarks/fuzz/main.py --minutes 30
python benchmarks/fuzz/main.py --only 17                                   one case, reported in full
python benchmarks/fuzz/main.py --only 17 --drop Reentrant --set stage=2    a part of it
python benchmarks/fuzz/main.py --only 17 --shrink                          the smallest case that still fails
python benchmarks/fuzz/main.py --products --cases 500                      products of features
python benchmarks/fuzz/main.py --products --unlike --seed 5000             with SGD, on unlike ranks
python benchmarks/fuzz/main.py --found                                     what found something once
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from fuzz.runner import Job, Runner, Summary, Verdict, jobs  # noqa: E402
from fuzz.shrink import shrink  # noqa: E402


def main() -> int:
    """Run the cases; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--ranks", default="1,2,3")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--only", type=int, metavar="SEED")
    parser.add_argument("--drop", default="", help="features to leave out, with commas")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="other values"
    )
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--has", default="", help="only cases with one of these features")
    parser.add_argument(
        "--keep", help="these features and kinds of blocks, in every case; no others"
    )
    parser.add_argument(
        "--products", action="store_true", help="of features, on every axis of ranks"
    )
    parser.add_argument(
        "--unlike",
        action="store_true",
        help="products with SGD without clipping, on ranks of unlike surroundings",
    )
    parser.add_argument("--found", action="store_true", help="all cases that found something once")
    options = parser.parse_args()
    if options.products:
        return _products(options)
    with Runner() as runner:
        if options.found:
            return _found(runner)
        if options.only is not None:
            return _one(runner, _job(options), shrinks=options.shrink)
        return _many(runner, options)


def _job(options: argparse.Namespace) -> Job:
    drop = tuple(name for name in options.drop.split(",") if name)
    changes = [entry.partition("=") for entry in options.set]
    keep = None if options.keep is None else tuple(filter(None, options.keep.split(",")))
    seed = options.seed if options.only is None else options.only
    return Job(seed, drop, keep, tuple((key, _value(text)) for key, _, text in changes))


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _one(runner: Runner, job: Job, *, shrinks: bool) -> int:
    verdict = runner.run(job)
    if shrinks and verdict.is_failure:
        verdict = shrink(runner, verdict)
        print(f"--drop {','.join(verdict.job.drop)} {_told_changes(verdict.job)}")
    _tell(verdict, 10_000)
    return 1 if verdict.is_failure else 0


def _told_changes(job: Job) -> str:
    return " ".join(f"--set '{key}={json.dumps(value)}'" for key, value in job.changes)


def _many(runner: Runner, options: argparse.Namespace) -> int:
    summary = Summary()
    start = time.monotonic()
    worlds = [int(word) for word in options.ranks.split(",")]
    wanted = set(filter(None, options.has.split(",")))
    found = (j for j in jobs(_job(options), worlds) if not wanted or wanted & set(j.case().names))
    for job in itertools.islice(found, options.cases):
        if time.monotonic() - start > 60 * options.minutes:
            break
        verdict = runner.run(job)
        summary.add(verdict)
        if verdict.outcome not in ("equal", "refused"):
            _tell(verdict, 1500)
    _sum_up(summary, time.monotonic() - start)
    return 1 if any(verdict.is_failure for verdict in summary.failures) else 0


def _found(runner: Runner) -> int:
    """All seeds that found something once; 1 if one fails again."""
    from fuzz.test_fuzz import FOUND

    verdicts = [
        runner.run(Job(seed, keep=tuple(names.split(","))))
        for names, seeds in FOUND.items()
        for seed in seeds
    ]
    for verdict in verdicts:
        _tell(verdict, 1500)
    return int(any(verdict.is_failure for verdict in verdicts))


def _products(options: argparse.Namespace) -> int:
    """Random products of features against one process; 1 if one failed."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from fuzz.products import Summary as Products
    from fuzz.products import draw
    from fuzz.surroundings import Servers

    found, start = Products(), time.monotonic()
    seeds = (
        range(options.seed, options.seed + options.cases)
        if options.only is None
        else [options.only]
    )
    with Servers() if options.unlike else nullcontext() as servers:
        for seed in seeds:
            if time.monotonic() - start > 60 * options.minutes:
                break
            if servers is not None:
                servers.first, found.run = seed, servers.run
            if found.add(draw(seed, sgd=options.unlike)) in ("wrong", "failed"):
                outcome, name, said = found.failures[-1]
                print(f"{outcome.upper()} {name}\n    {said}", flush=True)
            if sum(found.outcomes.values()) % 25 == 0:
                print(f"after seed {seed}: {dict(found.outcomes)}", flush=True)
    print(
        f"\n{sum(found.outcomes.values())} products in {time.monotonic() - start:.0f} s: {dict(found.outcomes)}"
    )
    for said, number in found.refusals.most_common():
        print(f"  refused {number} times: {said}")
    return int(bool(found.failures))


def _tell(verdict: Verdict, length: int) -> None:
    print(f"{verdict.outcome.upper()} {verdict.job.case()}")
    if verdict.said:
        print("    " + verdict.said[:length].replace("\n", "\n    "), flush=True)


def _sum_up(summary: Summary, seconds: float) -> None:
    count = sum(summary.outcomes.values())
    print(f"\n{count} cases in {seconds:.0f} s ({count / max(seconds, 1e-9):.1f} a second)")
    for outcome, number in summary.outcomes.most_common():
        seeds = [v.job.seed for v in summary.failures if v.outcome == outcome]
        print(f"  {outcome:8} {number:6}  {' '.join(map(str, seeds[:60]))}")
    for said, number in summary.refusals.most_common():
        print(f"  refused {number} times: {said}")
    if summary.features:
        print("  features of failures: " + str(summary.features.most_common(20)))


if __name__ == "__main__":
    sys.exit(main())
