"""`deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr`: batches of about equal tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from .....utils.errors import UsageError
from ....errors import raises_theirs
from ....missing import placeholder
from ....utils.logging import logger

_ORDERS = ("dataloader", "random", "seqlen")
_Sample = tuple[Any, int]  # (length, number in the dataset)


@raises_theirs
def batch_by_seqlens(  # noqa: PLR0913 (DeepSpeed's arguments)
    seqlens: Sequence[Any],
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[tuple[int, list[int]]], list[int], list[Any]]:
    """Put samples into micro-batches of at most `max_tokens`, as many as fit into each.

    Args:
        seqlens: the length of each sample.
        sequence_ids_per_mb: the samples to use; None: all.
        sequence_picking_order: "dataloader": as they are; "random"; "seqlen": the shortest first.
        effective_batch_size: micro-batches of a step. What does not fill a last step is dropped.
        required_microbatches_of_same_size: all micro-batches of a step have as many samples.
    Returns:
        (step and samples of each micro-batch, samples of each step, longest length of each step). Samples
        above `max_tokens` are left out, with a warning.
    Raises:
        UsageError: an unknown order, or too few samples for one step.
    """
    if sequence_picking_order not in _ORDERS:
        raise UsageError(
            f"sequence_picking_order = {sequence_picking_order!r}: must be one of {', '.join(_ORDERS)}"
        )
    samples = _picked(seqlens, sequence_ids_per_mb, sequence_picking_order, seed)
    too_long = [number for length, number in samples if length > max_tokens]
    if too_long:
        logger.warning("samples longer than %s tokens are left out: %s", max_tokens, too_long)
        samples = [one for one in samples if one[0] <= max_tokens]
    abreast = effective_batch_size if required_microbatches_of_same_size else 1
    bounds = min_batch_size or 0, max_batch_size or len(samples), max_tokens
    found: list[list[_Sample]] = []
    start = 0
    while start < len(samples):
        taken = _longest(samples, start, abreast, bounds)
        if taken == start:
            break
        found += [samples[start + first : taken : abreast] for first in range(abreast)]
        start = taken
    if len(found) < effective_batch_size:
        raise UsageError(
            f"there are {len(found)} micro-batches and a step has {effective_batch_size}: give more samples, "
            "or a smaller max_tokens"
        )
    return _by_step(found, effective_batch_size, verbose)


def _picked(
    seqlens: Sequence[Any], numbers: Sequence[int] | None, order: str, seed: int | None
) -> list[_Sample]:
    chosen = range(len(seqlens)) if numbers is None else numbers
    samples = [(seqlens[number], int(number)) for number in chosen]
    if order == "random":
        random.Random(seed).shuffle(samples)
    return sorted(samples) if order == "seqlen" else samples


def _longest(samples: list[_Sample], start: int, abreast: int, bounds: tuple[int, int, int]) -> int:
    """The end of the longest stretch from `start` whose `abreast` micro-batches are all within the bounds."""
    fewest, most, max_tokens = bounds
    found = start
    for end in range(start + abreast, len(samples) + 1, abreast):
        parts = [samples[start + first : end : abreast] for first in range(abreast)]
        if len(parts[0]) > most or any(sum(one[0] for one in part) > max_tokens for part in parts):
            break  # more samples do not make it smaller
        if len(parts[0]) >= fewest:
            found = end
    return found


def _by_step(
    found: list[list[_Sample]], size: int, verbose: bool
) -> tuple[list[tuple[int, list[int]]], list[int], list[Any]]:
    steps = [found[first : first + size] for first in range(0, len(found) - size + 1, size)]
    micro_batches = [
        (step, [number for _, number in one])
        for step, several in enumerate(steps)
        for one in several
    ]
    counts = [sum(map(len, several)) for several in steps]
    longest = [max(length for one in several for length, _ in one) for several in steps]
    if verbose:
        for step, (count, length) in enumerate(zip(counts, longest, strict=True)):
            logger.info("step %s: %s samples, the longest has %s tokens", step, count, length)
    return micro_batches, counts, longest


def scale_lr(
    base_batch_size: int, batch_size: int, base_lr: float = 1, method: str | None = "linear"
) -> float:
    """The lr for another batch size: by its ratio ("linear"), the root of it ("sqrt"), or the same (None).

    Raises:
        ValueError: another method.
    """
    if method is None or method.upper() == "NONE":
        return base_lr
    if method not in ("linear", "sqrt"):
        raise ValueError(f"scale_lr: method = {method!r}: must be linear, sqrt or none")
    ratio = batch_size / base_batch_size
    return base_lr * (ratio if method == "linear" else math.sqrt(ratio))


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
