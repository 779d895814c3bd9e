"""Tests of a pipeline's engine beside training: places, converted batches, outputs, losses left out."""

from __future__ import annotations

import pytest
import torch
from helpers import run_ranks
from pipeline_calls import calls, plain


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        ("1f1b", [(True, False), (False, True)]),
        ("zbv", [(True, True), (False, False)]),  # rank 0 has the first stage and the last
    ],
)
def test_evaluation_gives_losses_everywhere_and_outputs_on_the_last_stage(
    schedule: str, ends: list[tuple[bool, bool]]
) -> None:
    losses, outputs = plain()
    ranks = run_ranks(calls, 2, schedule)
    for rank, found in enumerate(ranks):
        assert found["place"] == (rank, 2)
        assert found["ends"] == ends[rank]
        assert found["loss"] == pytest.approx(torch.stack(losses[:3]).mean().item(), rel=1e-6)
        assert found["trained"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)
        assert found["same"]
        if found["ends"][1]:
            torch.testing.assert_close(found["outputs"], outputs[:3])
            torch.testing.assert_close(found["each"], losses[:3])
        else:
            assert found["outputs"] is None
