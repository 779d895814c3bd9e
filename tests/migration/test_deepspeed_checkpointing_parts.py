"""Tests of parts of `deepspeed.checkpointing` and `deepspeed.monitor` that scripts call by themselves."""

from __future__ import annotations

import pytest
import torch

from xds.deepspeed import checkpointing
from xds.utils.errors import UsageError


def test_detached_tensors_ask_for_gradients_as_before() -> None:
    x = torch.ones(1, requires_grad=True)
    found, number, frozen = checkpointing.detach_variable((x * 2, 3, torch.ones(1)))
    assert found.is_leaf and found.requires_grad and number == 3 and not frozen.requires_grad
    assert checkpointing.detach_variable((x,), device="meta")[0].is_meta
    with pytest.raises(UsageError, match="pass a tuple"):
        checkpointing.detach_variable([x])


def test_a_new_seed_changes_the_tracked_state_alone() -> None:
    before = torch.get_rng_state()
    try:
        checkpointing.model_parallel_cuda_manual_seed(7)
        outside = torch.get_rng_state()
        draws = []
        for seed in (1, 2, 1):
            checkpointing.model_parallel_reconfigure_tp_seed(seed)
            with checkpointing.get_cuda_rng_tracker().fork():
                draws.append(float(torch.rand(())))
        assert draws[0] == draws[2] != draws[1] and torch.equal(torch.get_rng_state(), outside)
        checkpointing.get_cuda_rng_tracker().reset()
        with pytest.raises(ValueError, match="there is no such state"):
            checkpointing.model_parallel_reconfigure_tp_seed(1)
    finally:
        torch.set_rng_state(before)
