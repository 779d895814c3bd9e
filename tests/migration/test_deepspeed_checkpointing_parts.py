"""Tests of parts of `deepspeed.checkpointing` and `deepspeed.monitor` that scripts call by themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from xds.deepspeed import checkpointing
from xds.deepspeed.monitor.comet import EventsLogScheduler
from xds.deepspeed.monitor.tensorboard import TensorBoardMonitor
from xds.utils.errors import UsageError


def test_arguments_are_told_apart_and_put_together() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    for given in ((x, None, y, 2.5), [None, x]):
        parts = checkpointing.extract_tensors(given)
        assert all(type(part) is type(given) for part in parts)
        merged = checkpointing.merge_tensors(*parts)
        assert all(a is b for a, b in zip(merged, given, strict=True))
    y.no_checkpointing = True
    flags = [checkpointing.is_activation_to_checkpoint(one) for one in (x, y, x.bool(), None)]
    assert flags == [True, False, False, False]


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


def test_events_are_due_after_an_interval_of_samples() -> None:
    scheduler = EventsLogScheduler(10)
    asked = [("loss", 0), ("loss", 9), ("lr", 9), ("loss", 10), ("loss", 19), ("loss", 25)]
    assert [scheduler.needs_logging(*one) for one in asked] == [
        True,
        False,
        True,
        True,
        False,
        True,
    ]
    off = TensorBoardMonitor(SimpleNamespace(enabled=False))
    off.write_events([("loss", 1.0, 1)], flush=False)
    off.flush()
