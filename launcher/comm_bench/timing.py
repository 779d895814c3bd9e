"""Checks a case on all ranks, and times it: the slowest rank, the median of the rounds."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from ...utils.errors import XdsError
from .cases import Case, RankContext
from .plan import Plan, Timing

_ROUNDS = 3
# more, while all take less than this share of the time: another process disturbs short rounds
_MORE_ROUNDS, _SHORT = 15, 0.1
Call = Callable[[], object]


def check(context: RankContext, case: Case, what: str) -> bool:
    """Whether the backend supports the op. Raises XdsError if the result is wrong on a rank."""
    case.fill()
    error = ""
    try:
        case.call()
        finish(context)
        state = 0 if case.is_right() else 1
    except (RuntimeError, NotImplementedError) as failure:
        error, state = f"{type(failure).__name__}: {failure}", 2
    states = gather_values(context, float(state))
    if all(found == 2 for found in states):
        note(context, f"{what}: skipped, {error.splitlines()[0]}")
        return False
    if 2 in states:
        raise XdsError(f"{what}: failed on rank {states.index(2)}{': ' * bool(error)}{error}")
    wrong = [str(rank) for rank, found in enumerate(states) if found]
    if wrong:
        raise XdsError(
            f"{what}: a wrong result on rank {', '.join(wrong)} of {context.world_size}; data that these ranks"
            " send cannot be trusted: check for faulty memory, network adapters or a broken backend"
        )
    return True


def timed(context: RankContext, case: Case, plan: Plan, copy: Call | None = None) -> Timing:
    """Of the slowest rank, the median of the rounds. copy: takes turns with the calls."""
    first = _slowest(context, case.call, 1)
    trials = max(1, min(plan.trials, int(plan.seconds / max(first, 1e-9))))
    rounds: list[float] = []
    copies: list[float] = []
    while len(rounds) < _ROUNDS or (
        len(rounds) < _MORE_ROUNDS and sum(rounds) * trials < _SHORT * plan.seconds
    ):
        rounds.append(_slowest(context, case.call, trials))
        if copy is not None:
            copies.append(_slowest(context, copy, trials))
    seconds = statistics.median(rounds)
    if copy is None:
        return Timing(seconds, trials)
    ratios = [one / other for one, other in zip(rounds, copies, strict=True)]
    return Timing(seconds, trials, statistics.median(copies), statistics.median(ratios))


def _slowest(context: RankContext, call: Call, trials: int) -> float:
    """Seconds of one call, of the slowest rank."""
    context.collectives.barrier()
    finish(context)
    start = time.perf_counter()
    for _ in range(trials):
        call()
    finish(context)
    return max(gather_values(context, (time.perf_counter() - start) / trials))


def finish(context: RankContext) -> None:
    if context.collectives.device.type == "cuda":
        torch.cuda.synchronize()


def gather_values(context: RankContext, value: float) -> list[float]:
    """Every rank's value, on every rank."""
    own = torch.tensor([value], dtype=torch.float64, device=context.collectives.device)
    return [float(found) for found in context.collectives.gather_small(own).flatten().tolist()]


def note(context: RankContext, text: str) -> None:
    if context.rank == 0:
        print(f"xds bench comm: {text}", file=sys.stderr, flush=True)


__all__ = ["check", "gather_values", "note", "timed"]
