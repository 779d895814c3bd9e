"""Test helper: engines of `xds.deepspeed`, and tests whose body runs on every rank."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import runs
import torch
from helpers import run_processes, run_ranks
from torch import nn

import xds.deepspeed as deepspeed


def on_ranks(world_size: int, *, processes: bool = False) -> Callable[..., Any]:
    """A test that is called on every rank. processes: for `zero.Init`, and what else belongs to a process."""
    run = run_processes if processes else run_ranks

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def test(**given: Any) -> None:
            run(functools.partial(function, **given), world_size)

        # processes find it under a name of its own
        function.__name__ = function.__qualname__ = f"_on_rank_{function.__name__}"
        setattr(sys.modules[function.__module__], function.__name__, function)
        return test

    return decorate


def config(stage: int = 0, precision: str = "fp32", **changes: Any) -> dict[str, Any]:
    """runs.config without clipping, which DeepSpeed does by default."""
    return runs.config(stage, precision, **{"gradient_clipping": 0.0, **changes})


def start(
    model: nn.Module,
    stage: int = 0,
    precision: str = "fp32",
    *,
    kind: str = "AdamW",
    optimizer: Any = None,
    **changes: Any,
) -> Any:
    """The engine. changes: see runs.config."""
    given = {"optimizer": optimizer} if optimizer else {"model_parameters": model.parameters()}
    made = config(stage, precision, optimizer=kind, **changes)
    if optimizer:
        del made["optimizer"]
    return deepspeed.initialize(model=model, config=made, **given)[0]


def whole_values(engine: Any) -> list[torch.Tensor]:
    """The parameters of any stage."""
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params):
        return [param.detach().clone() for param in params]


def assert_close(found: Any, expected: Any, **tolerances: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), **tolerances)
