"""`optimizer.eval()` and `train()` of optimizers without a schedule, which an example of accelerate calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from warm_ranks import warm

from xds import deepspeed


class Averaging(torch.optim.SGD):
    """Evaluates values that are 1 above those that it trains."""

    def eval(self) -> None:
        self._add(1.0)

    def train(self) -> None:
        self._add(-1.0)

    @torch.no_grad()
    def _add(self, number: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(number)


def outputs(stage: int, is_bf16: bool) -> dict[str, list[float]]:
    """What the model computes while it trains, evaluates and trains again; and after one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": is_bf16},
    }
    optimizer = Averaging(model.parameters(), lr=0.1)
    engine, shown, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def output() -> Tensor:
        found: Tensor = engine(torch.ones(1, 3, dtype=next(model.parameters()).dtype))
        return found

    found = []
    for switch in (lambda: None, shown.eval, shown.train):
        switch()
        with torch.no_grad():
            found.append(output().item())
    engine.backward(output().mean())
    engine.step()
    found.append(output().item())
    assert not hasattr(shown, "evaluate")
    return {"outputs": found}


def expected() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    optimizer = Averaging(model.parameters(), lr=0.1)
    found = []
    for switch in (lambda: None, optimizer.eval, optimizer.train):
        switch()
        found.append(model(torch.ones(1, 3)).item())
    model(torch.ones(1, 3)).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return [*found, model(torch.ones(1, 3)).item()]


@pytest.mark.parametrize(("stage", "is_bf16"), [(0, False), (1, False), (3, False), (2, True)])
def test_the_values_to_evaluate_reach_the_parameters_of_all_ranks(
    stage: int, is_bf16: bool
) -> None:
    """Each rank has changed its own part of them."""
    wanted = pytest.approx(expected(), rel=2e-2 if is_bf16 else 1e-5, abs=1e-2 * is_bf16)
    for found in warm(2).run(outputs, stage, is_bf16):
        assert found["outputs"] == wanted
