"""Pipelines that once failed or gave wrong numbers, found by random models and configs."""

from __future__ import annotations

import pytest
from helpers import run_processes, run_ranks
from pipeline_finds import (
    built_layers,
    compare_deferred_on_host,
    compare_tied_list,
    refusal,
    refusal_of_second,
)

from xds.pipe.schedules.build import choose
from xds.pipe.schedules.simulation import Costs


@pytest.mark.parametrize(
    ("schedule", "zero_stage", "same_layer"), [("zbv", 0, False), ("dualpipev", 3, True)]
)
def test_layer_in_two_stages_of_one_rank(schedule: str, zero_stage: int, same_layer: bool) -> None:
    """Its gradients come from two stages; it was taken as a block of the first one only."""
    assert max(run_ranks(compare_tied_list, 2, schedule, zero_stage, same_layer)) < 1e-5


def test_weight_gradients_come_late_and_sums_are_on_the_host() -> None:
    """A late gradient of a bias brings the earlier sum back; gradients that waited replaced that sum."""
    assert max(run_ranks(compare_deferred_on_host, 2, "dualpipev")) < 1e-5


@pytest.mark.parametrize(
    ("schedule", "chunks", "message"),
    [
        ("interleaved_1f1b", 10**9, "more stages than the model has layers"),  # it did not return
        ("auto", 7, "14 stages"),  # it spoke of a schedule that nobody asked for
    ],
)
def test_more_chunks_than_layers(schedule: str, chunks: int, message: str) -> None:
    for text in run_ranks(refusal, 2, schedule, chunks):
        assert message in text and "zbv" not in text


def test_a_model_that_was_cut_cannot_be_used_again() -> None:
    """The message said that ranks bring different models."""
    assert all("build the model again" in text for text in run_ranks(refusal_of_second, 2))


def test_auto_takes_a_schedule_that_has_the_chunks() -> None:
    assert choose(Costs(1, 1, 1), 2, 4, 8, 3) == "interleaved_1f1b"


def test_a_rank_builds_its_own_layers_only() -> None:
    """A look at all modules built the whole model on every rank."""
    assert max(run_processes(built_layers, 2)) <= 4
