"""Schedules of curricula, layer drop and random-LTD: equal to DeepSpeed's formulas at 100,000 points."""

import math
import random

import numpy as np
import pytest

from xds import UsageError
from xds.engine.data.schedules import LayerDrop, TokensKept, curriculum, tokens_kept

POINTS = 25_000  # for each of the four formulas


def reference_root(t, low, high, total, unit, root):
    d = math.floor((float(t) / total) ** (1.0 / root) * (high - low) + low)
    d -= d % unit
    return min(max(d, -(-low // unit) * unit), high)


def reference_discrete(t, values, ends):
    if t > ends[-1]:
        return values[-1]
    return next(value for value, end in zip(values, ends, strict=False) if t <= end)


def reference_tokens(t, low, high, total, unit):
    d = math.floor((float(t) / total) ** 1.0 * (high - low) + low)
    return min(d - d % unit, high)


def test_curricula_equal_the_formulas():
    draw = random.Random(0)
    for _ in range(POINTS // 50):
        low, high = sorted(draw.sample(range(1, 5000), 2))
        total, unit, root = draw.randint(1, 5000), draw.randint(1, 64), draw.choice([1, 2, 3, 2.5])
        section = {"total_curriculum_step": total, "difficulty_step": unit}
        kind = "fixed_linear" if root == 1 else "fixed_root"
        if root != 1:
            section["root_degree"] = root
        config = {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind}
        rises = curriculum({**config, "schedule_config": section})
        ends = sorted(draw.choices(range(1000), k=draw.randint(1, 8)))
        values = [draw.randint(1, 99) for _ in range(len(ends) + 1)]
        listed = {"difficulty": values, "max_step": ends}
        jumps = curriculum({"schedule_type": "fixed_discrete", "schedule_config": listed})
        for t in draw.choices(range(2 * total), k=50):
            assert rises.at(t) == reference_root(t, low, high, total, unit, root)
        for t in draw.choices(range(1100), k=50):
            assert jumps.at(t) == reference_discrete(t, values, ends)
    own = curriculum({"schedule_type": "custom"}, lambda step: step // 3)
    assert [own.at(t) for t in range(7)] == [0, 0, 0, 1, 1, 1, 2]


def test_theta_and_token_counts_equal_the_formulas():
    draw = random.Random(1)
    for _ in range(POINTS // 50):
        theta, gamma = draw.uniform(0.01, 1), draw.choice([0.0, 1e-3, draw.random()])
        unit, total = draw.randint(1, 64), draw.randint(1, 5000)
        low, high = sorted(draw.sample(range(unit, 5000), 2))
        drop, kept = LayerDrop(theta, gamma), TokensKept(low, high, total, unit)
        for t in draw.choices(range(10_000), k=50):
            assert drop.at(t) == (1.0 - theta) * np.exp(-gamma * t) + theta
            assert kept.at(t) == reference_tokens(t, low, high, total, unit)
    assert LayerDrop(1.0).at(10**6) == LayerDrop(0.5).at(0) == 1.0
    assert TokensKept(16, 64, 10, 16).layer_tokens(5, 2, 12, 10) == 2 * (32 * 10 + 64 * 2)


def rising(**more):
    section = {"total_curriculum_step": 10.0, "difficulty_step": 8.0, **more}
    limits = {"min_difficulty": 8.0, "max_difficulty": 64}
    return curriculum({**limits, "schedule_type": "fixed_linear", "schedule_config": section})


def listed(*values):
    section = {"difficulty": list(values), "max_step": [2.0]}
    return curriculum({"schedule_type": "fixed_discrete", "schedule_config": section})


def kept(**more):
    section = {"require_steps": 10.0, "seq_per_step": 8.0}
    limits = {"min_value": 8.0, "max_value": 64, "schedule_type": "fixed_linear", **more}
    return tokens_kept({**limits, "schedule_config": section})


def test_whole_floats_give_whole_numbers():
    """As a script computes them, such as 0.5 * tokens: lengths must be ints."""
    found = [
        schedule.at(step) for schedule in (rising(), kept(), listed(4.0, 8)) for step in (1, 9)
    ]
    assert found == [8, 56, 8, 56, 4, 8] and {type(one) for one in found} == {int}
    assert listed(0.5, 1).at(1) == 0.5


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: curriculum({}), "schedule_type"),
        (lambda: curriculum({"schedule_type": "custom"}), "function"),
        (lambda: curriculum({"schedule_type": "step"}), "'step'"),
        (
            lambda: curriculum(
                {
                    "schedule_type": "fixed_discrete",
                    "schedule_config": {"difficulty": [1, 2, 3], "max_step": [9, 5]},
                }
            ),
            "ascending",
        ),
        (lambda: rising(difficulty_step=2.5), "difficulty_step = 2.5: must be a whole number"),
        (lambda: rising(steps=3), "'steps' is an unknown key"),
        (lambda: listed("a", 4), "difficulty = 'a': must be a finite number"),
        (lambda: listed(math.nan, 4), "difficulty = nan: must be a finite number"),
        (lambda: listed(None, 4), "difficulty = None: must be a finite number"),
        (lambda: kept(min_value=math.nan), "min_value = nan: must be a whole number"),
        (lambda: kept(max_value=math.inf), "max_value = inf: must be a whole number"),
        (lambda: kept(min_value=80), "min_value = 80: must be at most max_value = 64"),
        (lambda: kept(steps=3), "'steps' is an unknown key"),
        (lambda: TokensKept(8, 64, 10, 16), "no token would be left"),
        (lambda: tokens_kept({"min_value": 1}), "max_value, schedule_type, schedule_config"),
        (lambda: LayerDrop(0.0), "theta = 0.0"),
    ],
)
def test_impossible_schedules_are_one_sentence(make, said):
    with pytest.raises(UsageError) as error:
        make()
    assert said in str(error.value) and "\n" not in str(error.value)
