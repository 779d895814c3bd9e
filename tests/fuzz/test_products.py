"""Random products of features against one process. `benchmarks/fuzz --products` runs more."""

from __future__ import annotations

import pytest

from .products import Layout, Product, Summary, draw, examine
from .surroundings import BARE, COMPILER, Servers

COUNT = 6
FOUND: tuple[int, ...] = ()  # seeds that came out wrong, hung or failed once


def _unlike(layout: Layout, *more: str) -> Product:
    return Product(0, "gpt", "fp32", 2, more, (), layout, None, "SGD")


UNLIKE = (
    _unlike(Layout((1, 2, 1, 2), 3, "none", "exact", "-")),
    _unlike(Layout((2, 2, 1, 1), 3, "optimizer", "hpZ", "1f1b"), "recompute"),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_products_of_features_train_as_one_process() -> None:
    found = Summary()
    for seed in (*FOUND, *range(COUNT)):
        found.add(draw(seed))
    assert not found.failures, found.failures
    assert found.outcomes["equal"] > found.outcomes["refused"] // 2


@pytest.mark.slow
def test_a_rank_that_has_loaded_the_compiler_sends_the_same_messages() -> None:
    with Servers((COMPILER, BARE)) as servers:
        for product in UNLIKE:
            assert examine(product, servers.run) == ("equal", "")
