"""Checks a case on all ranks, and times it: the slowest rank, the median of three rounds."""

from __future__ import annotations

import statistics
import sys
import time

import torch

from ...utils.errors import XdsError
from .cases import Case, RankContext
from .plan import Plan

_ROUNDS = 3


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


def timed(context: RankContext, case: Case, plan: Plan) -> tuple[float, int]:
    """(seconds of one call, consecutive calls): of the slowest rank, the median of three rounds."""
    first = max(gather_values(context, _seconds(context, case, 1)))
    trials = max(1, min(plan.trials, int(plan.seconds / max(first, 1e-9))))
    rounds = [max(gather_values(context, _seconds(context, case, trials))) for _ in range(_ROUNDS)]
    return statistics.median(rounds), trials


def _seconds(context: RankContext, case: Case, trials: int) -> float:
    context.collectives.barrier()
    finish(context)
    start = time.perf_counter()
    for _ in range(trials):
        case.call()
    finish(context)
    return (time.perf_counter() - start) / trials


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
