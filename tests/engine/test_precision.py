"""The loss scale as a table: DeepSpeed's trajectory."""

from __future__ import annotations

import pytest

from xds.engine.optim.loss_scale import DynamicScale, NoScale, StaticScale
from xds.utils.errors import XdsError


@pytest.mark.parametrize(
    ("steps", "window", "hysteresis", "consecutive", "want"),
    [
        # '.' a good step, 'x' an overflow; the scale after each, from 16
        ("....", 2, 1, False, [16, 16, 32, 32]),
        ("x..x", 100, 1, False, [8, 8, 8, 4]),
        ("xx.x", 100, 2, False, [16, 8, 8, 4]),
        ("x.x.x", 100, 2, True, [16, 16, 16, 16, 16]),
        ("x.x.x", 100, 2, False, [16, 16, 8, 8, 4]),
    ],
)
def test_dynamic_scale(
    steps: str, window: int, hysteresis: int, consecutive: bool, want: list[int]
) -> None:
    scale = DynamicScale(16.0, window, hysteresis, consecutive=consecutive, minimum=1.0)
    seen = []
    for step in steps:
        scale.after_step(overflow=step == "x")
        seen.append(scale.value)
    assert seen == want


def test_the_minimum_ends_the_run_with_a_sentence() -> None:
    scale = DynamicScale(2.0, 100, 1, consecutive=False, minimum=1.0)
    scale.after_step(overflow=True)
    assert scale.value == 1.0
    with pytest.raises(XdsError, match="min_loss_scale = 1: the model diverges in fp16"):
        scale.after_step(overflow=True)


def test_static_and_no_scale_stay() -> None:
    for scale in (StaticScale(128.0), NoScale(skips_overflow=False)):
        before = scale.value
        scale.after_step(overflow=True)
        assert scale.value == before
