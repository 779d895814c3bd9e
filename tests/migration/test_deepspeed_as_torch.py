"""Tests of the layer's engine used as a torch.nn.Module: gradients, names, `to`; and of its logger."""

from __future__ import annotations

import gc
import logging
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from helpers import run_processes
from torch import Tensor, nn

import xds
import xds.deepspeed as deepspeed
from xds.deepspeed.runtime.utils import set_random_seed
from xds.deepspeed.utils import logger, safe_get_full_grad, safe_set_full_grad

MAX_NORM = 0.05


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def engine_of(stage: int, steps: int = 1) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    model = build()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def batch_of(number: int, rank: int) -> Tensor:
    return torch.randn(1, 5, generator=torch.Generator().manual_seed(number * 10 + rank))


def plain(steps: int, world_size: int, accumulated: int) -> list[Tensor]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    for step in range(steps):
        for micro in range(accumulated):
            for rank in range(world_size):
                loss = model(batch_of(step * accumulated + micro, rank)).square().sum()
                (loss / world_size / accumulated).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def clip_by_torch(accumulated: int) -> None:
    engine, rank = engine_of(0, accumulated), dist.get_rank()
    for number in range(4 * accumulated):
        engine.backward(engine(batch_of(number, rank)).square().sum())
        if engine.is_gradient_accumulation_boundary():
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), MAX_NORM)
            first = next(iter(engine.parameters()))
            torch.testing.assert_close(safe_get_full_grad(first), first.grad)
        engine.step()
        assert all(param.grad is None for param in engine.parameters())
    expected = plain(4, dist.get_world_size(), accumulated)
    for found, other in zip(engine.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("world_size", "accumulated"), [(1, 1), (2, 1), (3, 2)])
def test_gradients_of_stage_0_can_be_clipped_by_torch(world_size: int, accumulated: int) -> None:
    run_processes(clip_by_torch, world_size, accumulated)


def change_shown() -> None:
    engine = engine_of(0)
    for change in ("set", "replace", "zero_grad"):
        engine.backward(engine(batch_of(1, 0)).sum())
        param = next(iter(engine.parameters()))
        if change == "set":
            safe_set_full_grad(param, torch.full_like(param, 2.0))
        elif change == "replace":
            param.grad = torch.full_like(param, 2.0)
        else:
            engine.zero_grad()
            assert param.grad is None
            continue
        assert torch.equal(safe_get_full_grad(param), torch.full_like(param, 2.0))
        engine.step()
        norm = engine.get_global_grad_norm()
        assert norm > 2.0 * param.numel() ** 0.5
    engine.backward(engine(batch_of(1, 0)).sum())
    engine.backward(engine(batch_of(1, 0)).sum())  # two losses of one step are added
    param = next(iter(engine.parameters()))
    both = param.grad.clone()
    engine.zero_grad()
    engine.backward(engine(batch_of(1, 0)).sum())
    torch.testing.assert_close(param.grad * 2, both)
    one = engine.module(batch_of(1, 0)).sum()
    with pytest.raises(xds.UsageError, match="for each loss"):
        one.backward()
    engine.step()


def test_shown_gradients_may_be_set_replaced_and_dropped() -> None:
    run_processes(change_shown, 2)


ONE_BIT = {
    "OneBitAdam": {"freeze_step": 3},
    "OneBitLamb": {"freeze_step": 3},
}


@pytest.mark.parametrize("kind", ONE_BIT)
def test_one_bit_optimizers_train_and_show_no_gradient_once_they_compress(kind: str) -> None:
    run_processes(one_bit, 2, kind)


def one_bit(kind: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": kind, "params": {"lr": 1e-3, **ONE_BIT[kind]}},
    }
    engine = deepspeed.initialize(model=build(), config=config)[0]
    shown = []
    for number in range(10):
        engine.backward(engine(batch_of(number, dist.get_rank())).square().sum())
        shown.append(next(iter(engine.parameters())).grad is not None)
        engine.step()
    assert shown[0] and not shown[-1]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_shown_gradients_end_with_their_engine(stage: int) -> None:
    run_processes(second_engine, 1, stage)


def second_engine(stage: int) -> None:
    engine = engine_of(0)
    model = engine.module
    engine.backward(engine(batch_of(1, 0)).sum())
    once = next(iter(model.parameters())).grad.clone()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }
    again = deepspeed.initialize(model=model, config=config)[0]
    again.backward(again(batch_of(1, 0)).sum())
    found = safe_get_full_grad(next(iter(model.parameters())))
    assert found is not None
    torch.testing.assert_close(found, once)


def dropped_engine() -> None:
    engine = engine_of(0)
    model = engine.module
    engine.backward(engine(batch_of(1, 0)).sum())
    del engine
    gc.collect()
    assert all(param.grad is None for param in model.parameters())


def test_shown_gradients_end_with_a_dropped_engine() -> None:
    run_processes(dropped_engine, 1)


def as_module() -> None:
    engine = engine_of(1)
    assert engine.get_global_grad_norm() is None
    engine.backward(engine(batch_of(1, 0)).sum())
    engine.step()
    norm = engine.get_global_grad_norm()
    assert isinstance(norm, Tensor) and norm.shape == () and norm.item() > 0
    assert engine.to("cpu") is engine and engine.apply(lambda one: None) is engine
    assert engine.train() is engine and engine.eval() is engine
    names = [f"module.{name}" for name, _ in engine.module.named_parameters()]
    assert [name for name, _ in engine.named_parameters()] == names == list(engine.state_dict())
    assert [name for name, _ in engine.named_parameters("a")][0] == "a.module.0.weight"
    assert [name for name, _ in engine.named_modules()] == ["", *_inside(engine.module)]
    assert list(engine.children()) == [engine.module] and next(engine.modules()) is engine
    kept = {name: value.clone() for name, value in engine.state_dict().items()}
    with pytest.raises(xds.UsageError, match="no_sync"):
        engine.enable_backward_allreduce = False
    engine.enable_backward_allreduce = True
    engine.load_state_dict(kept)
    engine.load_state_dict({name.removeprefix("module."): one for name, one in kept.items()})


def _inside(module: nn.Module) -> list[str]:
    return [f"module.{name}" if name else "module" for name, _ in module.named_modules()]


def test_an_engine_has_the_names_of_a_module_with_one_child() -> None:
    run_processes(as_module, 1)


def test_numpy_is_seeded_too() -> None:
    set_random_seed(7)
    first = numpy.random.rand(), torch.rand(1).item()
    set_random_seed(7)
    assert (numpy.random.rand(), torch.rand(1).item()) == first


def test_the_level_of_deepspeeds_logger_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="xds")
    logger.info("shown")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        logger.warning("hidden")
    finally:
        logging.getLogger("DeepSpeed").setLevel(logging.NOTSET)
    assert caplog.messages == ["shown"]
