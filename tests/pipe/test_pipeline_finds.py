"""Pipelines that once failed or gave wrong numbers, found by random models and configs."""

from __future__ import annotations

import pytest
from pipeline_finds import compare_deferred_on_host, compare_tied_list
from warm_ranks import warm


@pytest.mark.parametrize(
    ("schedule", "zero_stage", "same_layer"), [("zbv", 0, False), ("dualpipev", 3, True)]
)
def test_layer_in_two_stages_of_one_rank(schedule: str, zero_stage: int, same_layer: bool) -> None:
    """Its gradients come from two stages; it was taken as a block of the first one only."""
    assert max(warm(2).run(compare_tied_list, schedule, zero_stage, same_layer)) < 1e-5


def test_weight_gradients_come_late_and_sums_are_on_the_host() -> None:
    """A late gradient of a bias brings the earlier sum back; gradients that waited replaced that sum."""
    assert max(warm(2).run(compare_deferred_on_host, "dualpipev")) < 1e-5
