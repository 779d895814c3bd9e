"""Tests of zero-bubble pipelines with slices: weight gradients of slices are computed in W actions."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from tensor_cases import Case, batches, build
from warm_ranks import warm

import xds
from xds.pipe.weight_grads import WeightGrads


def train(schedule: str, name: str) -> tuple[list[tuple[float, float]], set[tuple[int, ...]], int]:
    """Losses and norms, the shapes of the gradients from W actions, and how many layers are prepared."""
    config = Case(name, 2, 1, 1, 2, 0).config()
    config["pipeline"]["schedule"] = schedule
    shapes: set[tuple[int, ...]] = set()
    owners: set[Any] = set()
    plain = WeightGrads._add

    def spied(self: WeightGrads, param: Any, grad: torch.Tensor, *rest: Any) -> None:
        shapes.add(tuple(grad.shape))
        owners.add(self)
        plain(self, param, grad, *rest)

    with mock.patch.object(WeightGrads, "_add", spied):
        engine = xds.initialize(build(name), config)
        found = []
        for step in range(3):
            loss = engine.train_batch(batches(name, step, engine.dp_rank))
            found.append((loss.item(), engine.get_global_grad_norm()))
    num_layers = sum(owner.num_layers for owner in owners)
    engine.destroy()
    return found, shapes, num_layers


@pytest.mark.parametrize("name", ["gpt", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_weight_gradients_of_slices_are_deferred(name):
    later = warm(4).run(train, "zero_bubble", name)
    at_once = warm(4).run(train, "1f1b", name)
    assert [steps for steps, _, _ in later] == [steps for steps, _, _ in at_once]
    # rows and columns of slices of qkv, out, up and down, of width 32
    expected = {(48, 32), (32, 16), (64, 32), (32, 64)}
    for _, shapes, num_layers in later[2:]:  # the first stage computes both gradients at once
        assert num_layers == 9  # four of each block, and the head
        assert shapes >= (expected if name == "gpt" else {shape[::-1] for shape in expected})
    assert at_once[2][1:] == (set(), 0)
