"""Random choices by a counter: functions of the seed, the step, the micro-batch and the layer.

Nothing is kept between calls, so every rank, a recomputation in backward and a run that resumes find the same.
The generator is numpy's Philox, of which every version and machine gives the same numbers. Source: Salmon et
al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011, https://doi.org/10.1145/2063384.2063405.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LAYERS, TOKENS = 1, 2  # what is chosen
_BITS = 53  # of a float64


def uniform(
    what: int, seed: int, step: int, micro_batch: int, layer: int, count: int
) -> NDArray[np.float64]:
    """`count` numbers, at least 0 and below 1. what: LAYERS or TOKENS."""
    key = np.array([seed, step], dtype=np.uint64)
    counter = np.array([0, layer, micro_batch, what], dtype=np.uint64)
    raw = np.random.Philox(counter=counter, key=key).random_raw(count)
    found: NDArray[np.float64] = (raw >> np.uint64(64 - _BITS)) * 2.0**-_BITS
    return found


def subset(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The positions of the `count` lowest of each row, ascending: [rows, n] -> [rows, count]."""
    lowest = np.argpartition(scores, count - 1, axis=1)[:, :count]
    found: NDArray[np.int64] = np.sort(lowest, axis=1)
    return found


__all__ = ["LAYERS", "TOKENS", "subset", "uniform"]
