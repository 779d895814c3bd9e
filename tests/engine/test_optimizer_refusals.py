"""Tests: parameters that torch's classes refuse, and groups that are added too late, raise one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xds

BAD = [
    ("optimizer", "RMSprop", {"alpha": "x"}),
    ("optimizer", "RMSprop", {"alpha": -1}),
    ("optimizer", "Adamax", {"betas": [0.9, 7]}),
    ("optimizer", "NAdam", {"bogus": 7}),
    ("optimizer", "Rprop", {"etas": 3}),
    ("optimizer", "Adadelta", {"rho": float("nan")}),
    ("scheduler", "StepLR", {"step_size": 0}),
    ("scheduler", "StepLR", {"step_size": "x"}),
    ("scheduler", "MultiStepLR", {"milestones": 3}),
    ("scheduler", "CosineAnnealingLR", {"T_max": 0}),
    ("scheduler", "OneCycleLR", {"max_lr": 0.1}),
    ("scheduler", "LinearLR", {"start_factor": 9}),
    ("scheduler", "CosineAnnealingWarmRestarts", {"T_0": -3}),
    ("scheduler", "PolynomialLR", {"power": "q"}),
    ("scheduler", "StepLR", {"step_size": 1, "last_epoch": 5}),
]


@pytest.mark.parametrize(("section", "kind", "params"), BAD, ids=lambda value: str(value)[:40])
def test_params_that_torch_refuses_are_one_sentence(
    section: str, kind: str, params: dict[str, Any]
) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    config[section] = {"type": kind, "params": params}
    with pytest.raises(xds.XdsError, match=rf"{section}\.params"):
        xds.initialize(torch.nn.Linear(3, 3), config)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "own"])
def test_a_group_that_is_added_after_initialize_is_refused(kind: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
    own = None
    if kind == "own":
        own = torch.optim.RMSprop(model[0].parameters(), lr=0.1)
    else:
        config["optimizer"] = {"type": kind, "params": {"lr": 0.1}}
    first = None if own else list(model[0].parameters())
    engine = xds.initialize(model, config, model_parameters=first, optimizer=own)
    with pytest.raises(xds.UsageError, match="add_param_group after xds.initialize"):
        engine.optimizer.add_param_group({"params": list(model[1].parameters())})
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
