"""Forty cases of the fuzzer, and the cases that found something once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from .runner import Job, Runner, Verdict, jobs

COUNT = 40  # benchmarks/fuzz runs for hours
FIRST_SEED = 1  # the same cases in every run: a failure is nobody's bad luck

# What came out wrong, hung, crashed or raised an error without a name once: the features alone, the seeds.
FOUND = {
    "AccumulationChanges": (1002, 1004, 1005, 1006),
    "BareBackward": (1000, 1003, 1006, 1013),
    "BareBackward,Evaluations,OptimizerGiven": (1001, 50234),
    "Checkpoint": (40161,),
    "ClampedInForward": (1000, 1002, 1006, 1010),
    "DataAssigned": (1000, 1002, 1004, 1005),
    "DataAssigned,WrittenGathered": (1000, 1002, 1004),
    "DoubleBlock": (1000, 1005, 1009),
    "EmbeddingBlock": (1000, 1002, 1006, 1010),
    "EmptyBlock": (1002, 1006, 1010, 1031),
    "FrozenForAStep": (1000, 1013, 1015),
    "FrozenLater": (1000, 1005, 1009),
    "FrozenNumbersBlock": (1000, 1002),
    "GradientHooks": (1000, 1002, 1004, 1005),
    "GradientPenalty": (1000,),
    "Loaded": (1006, 1010),
    "NoneBlock": (1000, 1002),
    "OneReentrant,ReusedBlocks": (1005, 1006, 1013),
    "Reentrant,BlockUsesAnother": (1000, 1010, 1015, 40525),
    "Reentrant,BlockUsesAnother,FunctionBlock": (601402,),
    "Reentrant,ReusedBlocks": (1010, 1015, 1031),
    "Reentrant,ReusedBlocks,OutsideUse": (1015, 1031, 1033),
    "Scaled": (1000, 1004, 1005, 1009),
    "ScaledBetweenSteps": (1000, 1003, 1006, 1010),
    "Teacher": (1000, 1002),
    "UnfrozenLater": (1000, 1002, 1004, 1006),
    "ViewBlock": (1001, 1002),
    "WrittenBetweenSteps": (1000, 1003, 1006, 1010),
    "WrittenInForward": (1000, 1003, 1006, 1010),
    "ZeroGrad": (1004, 1005, 1007),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as found:
        yield found


def told(verdict: Verdict) -> str:
    return f"{verdict.outcome}: {verdict.job.case()}\n{verdict.said}"


def check(runner: Runner, names: str, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        job = Job(seed, keep=tuple(names.split(",")))
        assert set(names.split(",")) <= set(job.case().names), "the case does not have the feature"
        verdict = runner.run(job)
        assert verdict.outcome in ("equal", "refused"), told(verdict)


@pytest.mark.parametrize("names", list(FOUND)[::2])
def test_what_found_something_once_is_equal_or_refused(runner: Runner, names: str) -> None:
    check(runner, names, FOUND[names][:1])


@pytest.mark.slow
def test_the_others_that_found_something_once_are_equal_or_refused(runner: Runner) -> None:
    """One seed of each; `benchmarks/fuzz/main.py --found` runs all."""
    for number, (names, seeds) in enumerate(FOUND.items()):
        check(runner, names, seeds[1 - number % 2 :][:1])


@pytest.mark.slow
def test_random_cases_are_equal_to_plain_pytorch_or_refused(runner: Runner) -> None:
    """No wrong number, no hang, no crash, no error without a name; and plain PyTorch itself never fails."""
    drawn = itertools.islice(jobs(Job(FIRST_SEED), (1, 2, 3)), COUNT)
    verdicts = [runner.run(job) for job in drawn]
    bad = [v for v in verdicts if v.is_failure or v.outcome == "invalid"]
    assert not bad, "\n\n".join(map(told, bad[:5]))
    others = [v for v in verdicts if v.outcome in ("sensitive", "beyond range")]
    assert len(others) < max(0.05 * len(verdicts), 3), "\n\n".join(map(told, others[:5]))
    refused = [v for v in verdicts if v.outcome == "refused"]
    assert len(refused) < max(0.2 * len(verdicts), 3), "\n\n".join(map(told, refused[:5]))
