"""A minute of random products of features against one process. `benchmarks/fuzz --products` runs more."""

from __future__ import annotations

import time

import pytest

from .products import Summary, draw

SECONDS = 60.0
FOUND: tuple[int, ...] = ()  # seeds that came out wrong, hung or failed once


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_products_of_features_train_as_one_process() -> None:
    found, start, seed = Summary(), time.monotonic(), 0
    for known in FOUND:
        found.add(draw(known))
    while time.monotonic() - start < SECONDS:
        found.add(draw(seed))
        seed += 1
    assert not found.failures, found.failures
    assert found.outcomes["equal"] > found.outcomes["refused"] // 2
