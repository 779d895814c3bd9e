"""The choice of few combinations: every pair is in it, and it is small."""

from __future__ import annotations

import itertools

import pytest
import thinned
from thinned import pairwise


@pytest.fixture(autouse=True)
def thins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinned, "RUNS_ALL", False)


def test_three_axes_of_two_values_need_four_of_eight() -> None:
    assert ["".join(one) for one in pairwise("ab", "xy", "12")] == ["ax1", "ay2", "bx2", "by1"]


def test_two_axes_are_their_product() -> None:
    assert pairwise("ab", (1, 2)) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


@pytest.mark.parametrize(
    ("sizes", "most"), [((4, 2, 2, 2), 8), ((3, 3, 4), 14), ((13, 3, 2, 2), 39)]
)
def test_every_two_values_meet(sizes: tuple[int, ...], most: int) -> None:
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    met = {pair for one in pairwise(*axes) for pair in itertools.combinations(one, 2)}
    assert met == {
        pair for a, b in itertools.combinations(axes, 2) for pair in itertools.product(a, b)
    }
    assert len(pairwise(*axes)) <= most


def test_all_combinations_run_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinned, "RUNS_ALL", True)
    assert len(pairwise("ab", "xy", "12")) == 8
