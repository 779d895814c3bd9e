"""The metric that a checkpoint was saved with: its arguments, and what the manifest says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from ...utils.arguments import whole, wrong
from ...utils.errors import UsageError

BEST = "best"  # the tag that means the best checkpoint, unless there is a checkpoint of this name
MODES = ("min", "max")


@dataclass(frozen=True)
class Score:
    """What `save_checkpoint` was told of a checkpoint.

    metric: None stands for a value that is not finite, which is worse than any other.
    keep_best: how many of the best stay; 0: all.
    """

    metric: Annotated[float, Field(allow_inf_nan=False)] | None
    mode: Literal["min", "max"]
    keep_best: Annotated[int, Field(strict=True, ge=0)]


def asked_score(metric: Any, mode: Any, keep_best: Any) -> list[Any]:
    """These arguments of `save_checkpoint` on one rank, as JSON for `score_of`. Raises UsageError."""
    if mode not in MODES:
        raise wrong("save_checkpoint: mode", mode, '"min" or "max"')
    number = number_of(metric)
    keep_best = whole("save_checkpoint: keep_best", keep_best, 0)
    return [None if number is None else repr(number), mode, keep_best]  # JSON has no NaN


def number_of(metric: Any) -> float | None:
    """NaN if it is not finite."""
    if metric is None:
        return None
    try:
        if isinstance(metric, str | bytes | bool):
            raise TypeError
        value = float(metric)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise wrong(
            "save_checkpoint: metric", metric, "a number, or a tensor of one element"
        ) from None
    return value if math.isfinite(value) else math.nan


def score_of(asked: Sequence[list[Any]]) -> Score | None:
    """The score from what `asked_score` returned on each rank; mode and keep_best are those of rank 0.

    Raises:
        UsageError: the ranks give different numbers, or none. The same on every rank.
    """
    _, mode, keep_best = asked[0]
    given = {rank: number for rank, (number, _, _) in enumerate(asked) if number is not None}
    if not given:
        if keep_best:
            raise UsageError(
                f"save_checkpoint: keep_best = {keep_best} needs metric, a number that tells which are best"
            )
        return None
    first, *others = given
    for rank in others:
        if given[rank] != given[first]:
            raise UsageError(
                f"save_checkpoint: metric = {given[first]} on rank {first} and {given[rank]} on rank {rank}: "
                "give all ranks one number, such as a mean from dist.all_reduce, or give it on one rank alone"
            )
    value = float(given[first])
    return Score(None if math.isnan(value) else value, mode, keep_best)


__all__ = ["BEST", "Score", "asked_score", "number_of", "score_of"]
