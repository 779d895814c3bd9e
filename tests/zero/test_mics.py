"""MiCS: the numbers of plain PyTorch, the bytes and states of the formulas, one model on all replicas."""

from __future__ import annotations

from typing import Any

import pytest
from mics_runs import (
    STEPS,
    check_near,
    config_of,
    plain,
    same_bits,
    train_each,
)
from models import FEATURES
from thinned import pairwise
from warm_ranks import warm

SLOW = pytest.mark.slow
R, S = 2, 2  # replicas, ranks of a shard group


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=SLOW)


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "feature"),
    [
        (1, "fp32", 2, "plain"),
        (3, "fp32", 2, "mixed_shapes"),
        (2, "bf16", 2, "plain"),
        slow(2, "fp32", 3, "plain"),
        slow(3, "bf16", 2, "plain"),
        slow(2, "fp16", 1, "plain"),
        slow(3, "fp32", 1, "frozen"),
        *(
            slow(*case)
            for case in pairwise((1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2, 3), FEATURES)
        ),
    ],
)
def test_steps_are_those_of_plain_pytorch(
    stage: int, precision: str, accumulation: int, feature: str
) -> None:
    steps = 20 if precision == "fp32" and not feature.startswith("compiled") else STEPS
    config = config_of(stage, S, precision, accumulation)
    ranks = [found[0] for found in warm(4).run(train_each, (config, feature, steps))]
    for found in ranks:
        same_bits(found, ranks[0])
    wanted = plain(feature, accumulation, steps)
    if precision == "fp32":
        return check_near(ranks[0], wanted, 1e-5)
    for one, two in zip(ranks[0]["losses"], wanted["losses"], strict=True):
        assert abs(one - two) <= 0.02 * two
    zero = warm(4).run(train_each, (config_of(stage, 0, precision, accumulation), feature, steps))
    for one, two in zip(ranks[0]["losses"], zero[0][0]["losses"], strict=True):
        assert abs(one - two) <= 2e-3 * two


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_groups_of_all_ranks_or_of_one_are_zero_and_stage_0(stage: int) -> None:
    cases = [config_of(stage, 4, "bf16", 2), config_of(stage, 0, "bf16", 2)]
    cases += [config_of(stage, 1, "bf16", 2), config_of(0, 0, "bf16", 2)]
    for all_ranks, zero, one_rank, stage_0 in warm(4).run(train_each, *cases):
        same_bits(all_ranks, zero)
        same_bits(one_rank, stage_0)
        assert all_ranks["sent"] == zero["sent"] and one_rank["sent"] == stage_0["sent"]
        assert all_ranks["held"] == zero["held"] and one_rank["held"] == stage_0["held"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_and_states_are_those_of_the_formulas(precision: str) -> None:
    """Gathers stay inside; only sums cross, once in a step, whatever the number of micro-batches."""
    count, size = 3, {"fp32": 4, "bf16": 2}[precision]
    cases = [
        (config_of(stage, S, precision, count), "plain", 3, (0, 0, 1, 1)) for stage in (1, 2, 3)
    ]
    for results in warm(4).run(train_each, *cases):
        for stage, found in zip((1, 2, 3), results, strict=True):
            numel = sum(whole for whole, _ in found["sizes"])
            shard = sum(part for _, part in found["sizes"])
            assert shard * S == numel
            inside = shard * (S - 1)
            sent = found["sent"]
            assert sent["reduce_scatter"] == inside * size * (1 if stage == 1 else count)
            assert sent["all_reduce"] == 2 * (R - 1) * shard * 4 // R
            if stage < 3:
                assert sent["all_gather"] == inside * size
            crossing = {kind for kind, bytes_ in found["across"].items() if bytes_}
            assert crossing <= {"all_reduce", "control", "access"}
            held = found["held"]
            assert held["param"] == (shard if stage == 3 else numel) * size
            assert held["master"] == (shard * 4 if precision == "bf16" else 0)
            constant = held["optimizer"] - 2 * 4 * shard
            assert 0 <= constant <= 64 * len(found["sizes"])
