"""Tests of optimizers that the stock integrations pass: those whose update is not per element are named."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers import run_new_ranks
from torch import nn

import xds
import xds.deepspeed as deepspeed


class Shampoo(torch.optim.SGD):
    """An optimizer of a library, as far as its name goes."""


class Tuned(torch.optim.Adafactor):
    """A class that is made from one that sees shapes."""


def built() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))


def engine_of(stage: int, optimizer: Any, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    model = built()
    given = optimizer(model.parameters()) if isinstance(optimizer, type) else optimizer
    return deepspeed.initialize(model=model, optimizer=given, config=config)[0]


def warnings_of(stage: int, optimizer: Any) -> list[str]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("xds")
    log.addHandler(handler)
    try:
        engine_of(stage, optimizer, zero_allow_untested_optimizer=True).destroy()
    finally:
        log.removeHandler(handler)
    return [text for text in said if "1-D shards" in text]


def warn(stage: int) -> list[list[str]]:
    kinds = [Shampoo, Tuned, torch.optim.Adafactor, torch.optim.AdamW]
    given = [*kinds, lambda params: torch.optim.Adafactor(params)]
    return [warnings_of(stage, each) for each in given]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_first_rank_warns_once_of_an_optimizer_that_sees_shapes(stage: int) -> None:
    first, second = run_new_ranks(warn, 2, stage)
    assert [len(texts) for texts in first] == [1, 1, 1, 0, 1] and not any(second)
    assert first[0][0].startswith("Shampoo: its update depends on the shape")


def refuse() -> None:
    for optimizer in (torch.optim.Adafactor, lambda params: torch.optim.Adafactor(params)):
        with pytest.raises(xds.UsageError, match="Adafactor: this optimizer may use the shape"):
            engine_of(2, optimizer)


def test_without_the_users_word_it_is_refused_on_shards() -> None:
    run_new_ranks(refuse, 2)


def train_whole(through_a_callable: bool) -> None:
    kind: Any = torch.optim.Adafactor
    if through_a_callable:
        kind = lambda params: torch.optim.Adafactor(params)  # noqa: E731
    engine = engine_of(0, kind)
    expected = built()
    plain = torch.optim.Adafactor(expected.parameters())
    batch = torch.arange(5.0).view(1, 5)
    for _ in range(3):
        engine.backward(engine(batch).sum())
        engine.step()
        expected(batch).sum().backward()
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(engine(batch).detach(), expected(batch).detach())


@pytest.mark.parametrize("through_a_callable", [False, True])
def test_at_stage_0_it_gets_whole_parameters(through_a_callable: bool) -> None:
    run_new_ranks(train_whole, 2, through_a_callable)
