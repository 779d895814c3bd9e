"""The share of a run's time that trains, where ranks fail: the best interval between checkpoints.

Failures come at random, on average one in `failure_seconds` (exponential times). After a failure the ranks
restart, and repeat what was trained since the last checkpoint. A failure can also hit a save or a restart.

Sources: Young, A first order approximation to the optimum checkpoint interval, 1974: the interval is about
sqrt(2 save_seconds failure_seconds). Daly, A higher order estimate of the optimum checkpoint interval for
restart dumps, 2006: the expectation below, exact for exponential times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import final

from ...utils.errors import UsageError


@final
@dataclass(frozen=True)
class Goodput:
    """Shares of the time of a run, which sum to 1.

    useful: steps that are kept. saving: training stands still for a save. restarting: from a failure to the
    next step. repeating: steps and saves that a failure undid.
    """

    interval_seconds: float
    useful: float
    saving: float
    restarting: float
    repeating: float


@final
@dataclass(frozen=True)
class SimulatedRun:
    """One run with random failures. The shares are those of its own time."""

    goodput: Goodput
    num_failures: int


def best_interval_seconds(failure_seconds: float, save_seconds: float) -> float:
    """Seconds of training between two saves for which the useful share is largest.

    The time of a restart does not change it. Where saves are free it is 0: save after each step.

    Raises:
        UsageError: a time is negative, or the time between failures is not positive.

    >>> round(best_interval_seconds(3600.0, 10.0))
    262
    """
    _check(failure_seconds=failure_seconds, save_seconds=save_seconds)
    # the derivative of `goodput_of` is 0 where x + log(1 - x) = -c; both are in units of failure_seconds
    save = save_seconds / failure_seconds
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        is_above = middle < 1 and middle + math.log1p(-middle) > -save
        low, high = (middle, high) if is_above else (low, middle)
    return low * failure_seconds


def goodput_of(
    failure_seconds: float,
    save_seconds: float,
    restart_seconds: float,
    interval_seconds: float | None = None,
) -> Goodput:
    """The expected shares of a long run.

    Args:
        failure_seconds: mean time between failures of the whole run: that of a GPU divided by their number.
        save_seconds: for which a save stops training; what is written in the background does not count.
        restart_seconds: from a failure to the next step.
        interval_seconds: of training between two saves; None: the best one.

    Raises:
        UsageError: a time is negative, or the time between failures is not positive.

    >>> round(goodput_of(11127.0, 12.0, 600.0).useful, 3)
    0.904
    """
    _check(failure_seconds=failure_seconds, save_seconds=save_seconds)
    _check(restart_seconds=restart_seconds)
    if interval_seconds is None:
        interval_seconds = best_interval_seconds(failure_seconds, save_seconds)
    _check(interval_seconds=interval_seconds)
    restarted = math.exp(-restart_seconds / failure_seconds)  # restarts that no failure ends
    round_seconds = interval_seconds + save_seconds
    # rounds that end, in a time of failure_seconds without restarts; 700: exp overflows above
    exponent = min(round_seconds / failure_seconds, 700.0)
    rounds = restarted / math.expm1(exponent) if exponent else math.inf
    if math.isinf(rounds):  # free saves after each step: nothing is repeated
        return Goodput(0.0, restarted, 0.0, 1 - restarted, 0.0)
    useful = rounds * interval_seconds / failure_seconds
    saving = rounds * save_seconds / failure_seconds
    repeating = max(restarted - useful - saving, 0.0)
    return Goodput(interval_seconds, useful, saving, 1 - restarted, repeating)


def simulate_run(
    seconds: float,
    failure_seconds: float,
    save_seconds: float,
    restart_seconds: float,
    interval_seconds: float,
    seed: int = 0,
) -> SimulatedRun:
    """A run of `seconds`, failure by failure: it begins with a step, and all of it counts, also its end.

    Raises:
        UsageError: as `goodput_of`; or the interval is not positive.
    """
    _check(failure_seconds=failure_seconds, save_seconds=save_seconds)
    _check(restart_seconds=restart_seconds)
    _check(is_positive=True, interval_seconds=interval_seconds, seconds=seconds)
    random = Random(seed)
    now = useful = saving = restarting = repeating = 0.0
    num_failures = 0
    while now < seconds:
        # until the next failure, or the end of the run, where what was trained since the last save counts
        left = random.expovariate(1 / failure_seconds)
        is_end = now + left >= seconds
        left = min(left, seconds - now)
        now += left
        start = 0.0 if not num_failures else min(restart_seconds, left)
        restarting += start
        left -= start
        whole, rest = divmod(left, interval_seconds + save_seconds)
        trained = min(rest, interval_seconds)
        useful += whole * interval_seconds + trained * is_end
        saving += whole * save_seconds + (rest - trained) * is_end
        repeating += rest * (not is_end)
        num_failures += not is_end
    shares = (each / seconds for each in (useful, saving, restarting, repeating))
    return SimulatedRun(Goodput(interval_seconds, *shares), num_failures)


def _check(*, is_positive: bool = False, **times: float) -> None:
    """Raise a UsageError for a time that is none."""
    for name, value in times.items():
        needs_more = is_positive or name == "failure_seconds"
        if not math.isfinite(value) or value < 0 or (needs_more and value == 0):
            need = "above 0" if needs_more else "at least 0"
            raise UsageError(f"{name} = {value}: must be a number of seconds, {need}")


__all__ = ["Goodput", "SimulatedRun", "best_interval_seconds", "goodput_of", "simulate_run"]
