"""Batches of samples of unequal lengths, each with at most so many tokens, and the learning rate of each.

    max_tokens 8     lengths   3 2 2 | 5 3 | 1 6 | 4 ...    a micro-batch ends where the next one does not fit

`batch_by_seqlens` has the arguments, the result and the batches of DeepSpeed 0.19, in linear time. Its defects
are left out: the last sample is not lost, and a sample that fits no batch does not end the dataset.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Sequence

import numpy as np

from ...utils.errors import UsageError
from ...utils.quoting import quoted

log = logging.getLogger("xds")

ORDERS = ("dataloader", "random", "seqlen")
METHODS = ("linear", "sqrt", "none")


def batch_by_seqlens(  # noqa: PLR0913 (the arguments of DeepSpeed)
    seqlens: Sequence[int],
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[tuple[int, list[int]]], list[int], list[int]]:
    """Cut a dataset into micro-batches of at most `max_tokens` tokens. Longer samples are left out.

    Args:
        seqlens: tokens of each sample.
        sequence_ids_per_mb: only these samples, in this order; None: all.
        min_batch_size: samples of a micro-batch, at least. A sample that cannot be in one is left out.
        max_batch_size: at most; None: no limit.
        sequence_picking_order: "dataloader" (as they are), "random", or "seqlen" (the shortest first).
        effective_batch_size: micro-batches of a step over all ranks. What does not fill a step is left out.
        required_microbatches_of_same_size: the micro-batches of a step have the same number of samples.
        verbose: log each step.
        seed: of the order "random", the same on every rank.

    Returns:
        the number of the step and the samples of each micro-batch; then by step: the number of samples, and
        the tokens of the longest sample.

    Raises:
        UsageError: an argument is wrong, or the samples do not fill one step.
    """
    _check(max_tokens, min_batch_size, max_batch_size, effective_batch_size)
    lengths = np.asarray(seqlens, np.int64)
    ids = (
        np.arange(len(lengths)) if sequence_ids_per_mb is None else np.asarray(sequence_ids_per_mb)
    )
    ids = _ordered(lengths, ids, sequence_picking_order, seed)
    fits = lengths[ids] <= max_tokens
    if not fits.all():
        log.warning(
            "%d of %d samples are left out: they have more than max_tokens = %d tokens",
            *(len(ids) - fits.sum(), len(ids), max_tokens),
        )
    ids = ids[fits]
    width = effective_batch_size if required_microbatches_of_same_size else 1
    chosen, micros = ids.tolist(), list[list[int]]()
    limits = (max_tokens, min_batch_size, max_batch_size or len(chosen))
    for start, stop in _cuts(lengths[ids].tolist(), width, *limits):
        # each takes every `width`-th sample, as ranks do of a sampler: so sorted samples are balanced
        micros += [chosen[start + at : stop : width] for at in range(width)]
    num_steps = len(micros) // effective_batch_size
    if not num_steps:
        raise UsageError(
            f"effective_batch_size = {effective_batch_size} (train_batch_size of the config): {len(chosen)} "
            f"samples of at most max_tokens = {max_tokens} tokens make only {len(micros)} micro-batches of at "
            f"least {min_batch_size}; lower it, max_tokens or min_batch_size"
        )
    steps = [
        micros[at * effective_batch_size : (at + 1) * effective_batch_size]
        for at in range(num_steps)
    ]
    sizes = [sum(map(len, step)) for step in steps]
    longest = [max(int(lengths[micro].max()) for micro in step) for step in steps]
    for at in range(num_steps if verbose else 0):
        log.info("step %d: %d samples of up to %d tokens", at, sizes[at], longest[at])
    return [(at, micro) for at, step in enumerate(steps) for micro in step], sizes, longest


def scale_lr(
    base_batch_size: int, batch_size: int, base_lr: float = 1, method: str | None = "linear"
) -> float:
    """The learning rate of a batch whose size is not that for which `base_lr` was chosen.

    Args:
        method: "linear" (arXiv 1706.02677), "sqrt" (arXiv 1404.5997), or "none".

    Raises:
        UsageError: there is no such method, or a size is not positive.
    """
    if base_batch_size < 1 or batch_size < 0:
        raise UsageError(
            f"base_batch_size = {base_batch_size}, batch_size = {batch_size}: no sizes of batches"
        )
    kind = "none" if method is None else str(method).lower()
    if kind not in METHODS:
        raise UsageError(
            f"lr_scaling_method = {quoted(method)}: must be one of {', '.join(METHODS)}"
        )
    if kind == "linear":
        return base_lr * batch_size / base_batch_size
    return base_lr * math.sqrt(batch_size / base_batch_size) if kind == "sqrt" else base_lr


def _check(max_tokens: int, least: int, most: int | None, effective_batch_size: int) -> None:
    for name, value in (
        ("max_tokens", max_tokens),
        ("effective_batch_size", effective_batch_size),
        ("max_batch_size", 1 if most is None else most),
    ):
        if value < 1:
            raise UsageError(f"{name} = {value}: must be at least 1")
    if most is not None and least > most:
        raise UsageError(f"min_batch_size = {least}: must be at most max_batch_size = {most}")


def _ordered(
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    ids: np.ndarray[tuple[int], np.dtype[np.int64]],
    order: str,
    seed: int | None,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The samples `ids` in the order in which they are picked."""
    if order not in ORDERS:
        raise UsageError(
            f"sequence_picking_order = {quoted(order)}: must be one of {', '.join(ORDERS)}"
        )
    if order == "random":
        places = list(range(len(ids)))
        random.Random(seed).shuffle(places)
        return ids[places]
    return ids[np.lexsort((ids, lengths[ids]))] if order == "seqlen" else ids


def _cuts(
    lengths: Sequence[int], width: int, max_tokens: int, least: int, most: int
) -> Iterator[tuple[int, int]]:
    """Where each group of `width` micro-batches begins and ends. Its sample i is in its micro-batch i % width.

    A group is as long as its micro-batches have at most `max_tokens` tokens and `most` samples.
    """
    start = 0
    while start + width <= len(lengths):
        sums, stop = [0] * width, start
        while stop + width <= len(lengths) and stop - start < most * width:
            sums = [a + b for a, b in zip(sums, lengths[stop : stop + width], strict=True)]
            if max(sums) > max_tokens:
                break
            stop += width
        if stop - start < max(least, 1) * width:
            start += width  # the first of them cannot be in a group; the others may
        else:
            yield start, stop
            start = stop


__all__ = ["METHODS", "ORDERS", "batch_by_seqlens", "scale_lr"]
