"""Six random products of features against one process. `benchmarks/fuzz --products` runs more."""

from __future__ import annotations

import pytest

from .products import Summary, draw

COUNT = 6
FOUND: tuple[int, ...] = ()  # seeds that came out wrong, hung or failed once


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_products_of_features_train_as_one_process() -> None:
    found = Summary()
    for seed in (*FOUND, *range(COUNT)):
        found.add(draw(seed))
    assert not found.failures, found.failures
    assert found.outcomes["equal"] > found.outcomes["refused"] // 2
