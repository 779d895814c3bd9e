"""Training in pipeline stages equals training in one process.

fp32: loss and norm within 1e-6 relative a step. 1f1b at stages 0 and 1: masters bit-equal to those without a
pipeline. 16 bits: near the same precision without a pipeline.
"""

from __future__ import annotations

import pytest
from pipeline_cases import Case, faults, matrix
from thinned import few_of

SHARP = [  # every value of every axis once
    Case(2, 1, 0, "1f1b", "fp32", "checkpointed"),
    Case(2, 2, 1, "1f1b", "fp32", "frozen_last"),
    Case(2, 2, 2, "zero_bubble", "fp32", "tied"),
    Case(2, 2, 3, "zbv", "fp32", "clipped"),
    Case(2, 2, 0, "1f1b", "bf16", "frozen_first"),
    Case(2, 2, 3, "dualpipev", "fp16", "plain"),
    Case(4, 1, 1, "interleaved_1f1b", "fp32", "tied"),
    Case(4, 1, 3, "gpipe", "bf16", "plain"),
]


@pytest.mark.parametrize(
    "case",
    [
        case if number in (1, 3, 4, 6) else pytest.param(case, marks=pytest.mark.slow)
        for number, case in enumerate(SHARP)
    ],
    ids=lambda case: case.name,
)
def test_steps_equal_those_of_one_process(case: Case) -> None:
    assert faults(case) == []


CHOSEN = few_of(
    sorted(matrix(), key=lambda case: case.world_size),  # the smallest of equals
    lambda case: (case.pipe, case.data, case.stage, case.schedule, case.precision, case.kind),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_every_way_of_cutting_equals_one_process(case: Case) -> None:
    assert faults(case) == []
