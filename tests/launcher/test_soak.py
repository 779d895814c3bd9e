"""A training on three hosts with random faults: it finishes, and no process remains.

The long soak is benchmarks/launcher/soak.py.
"""

import pytest
from real_hosts import why_not
from soak_runs import Plan, soak

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")


@pytest.mark.slow
def test_a_training_that_is_hurt_ends_with_the_loss_of_an_undisturbed_one():
    tally = soak(Plan(seconds=15, every_seconds=5, num_hosts=3, num_steps=20, stage=3))
    assert tally.problems == []
    assert tally.hurts.total() >= 1  # a busy machine takes its time to start again
