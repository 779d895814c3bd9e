"""What scripts call as with plain torch: zero_grad() of modules and optimizer, optimizer.step(), schedules."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config, plain
from torch import Tensor, nn

import xds

OPTIONS = {"lr": 0.05, "weight_decay": 0.1}


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def engine_of(stage: int, model: nn.Module | None = None, **more: Any) -> xds.Engine:
    """With SGD, if there is no `optimizer`."""
    optimizer = more.pop("optimizer", None)
    settings = config(stage, optimizer="SGD", params=OPTIONS, **more)
    if optimizer is not None:
        del settings["optimizer"]
    return xds.initialize(model_of() if model is None else model, settings, optimizer=optimizer)


def batch_of(number: int, rank: int) -> Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * number + rank))


def loss_of(run: Callable[[Tensor], Tensor], number: int) -> Tensor:
    """Of micro-batch `number` of this rank."""
    return run(batch_of(number, dist.get_rank())).square().mean()


def values(engine: xds.Engine) -> list[Tensor]:
    return list(engine.state_dict().values())


def trained(stage: int, steps: int, *, each: int = 1, **more: Any) -> list[Tensor]:
    """After `steps` plain steps of `each` micro-batches."""
    engine = engine_of(stage, accumulation=each, **more)
    for number in range(steps * each):
        engine.backward(loss_of(engine, number))
        engine.step()
    found = values(engine)
    engine.destroy()
    return found


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(one.equal(other) for one, other in zip(found, wanted, strict=True))


# -- zero_grad ------------------------------------------------------------------------------------------------


def callers(stage: int, make: Any) -> None:
    model = model_of()
    given = None if make is None else make(model.parameters())
    engine = engine_of(stage, model, optimizer=given)
    for zero in (
        engine.zero_grad,
        model.zero_grad,
        engine.module.zero_grad,
        engine.optimizer.zero_grad,
        *([] if given is None else [given.zero_grad]),
    ):
        zero()
        engine.backward(loss_of(engine, 7) * float("nan"))
        zero()
        with pytest.raises(xds.UsageError, match="not between backward and step"):
            engine.step()
        loss_of(engine, 8).backward()  # the script's own
        zero(set_to_none=False) if zero != engine.zero_grad else zero()
        with engine.no_sync():
            engine.backward(loss_of(engine, 9))
        zero()
    for number in range(2):
        engine.backward(loss_of(engine, number))
        engine.step()
        engine.optimizer.zero_grad()
    same(values(engine), trained(stage, 2, optimizer=make))
    engine.destroy()


def in_an_accumulation(stage: int) -> None:
    """As in plain torch: dropped micro-batches are missing in the step, which stays as long as it was."""
    found = []
    for drops in ("engine", "optimizer", "module"):
        engine = engine_of(stage, gradient_accumulation_steps=3, gradient_clipping=0.0)
        for number in range(3):
            engine.backward(loss_of(engine, number))
            engine.step()
            if number == 0:
                (engine if drops == "engine" else getattr(engine, drops)).zero_grad()
        assert engine.was_step_applied()
        found.append((engine.get_global_grad_norm(), values(engine)))
        engine.destroy()
    model = model_of()
    for number in (1, 2):
        for rank in range(dist.get_world_size()):
            loss = model(batch_of(number, rank)).square().mean()
            (loss / 3 / dist.get_world_size()).backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    for one, those in found:
        assert one == pytest.approx(norm.item(), rel=1e-4)
        same(those, found[0][1])


def of_a_part(stage: int) -> None:
    engine = engine_of(stage)
    part = engine.module[1]
    part.zero_grad()  # there is nothing to drop
    engine.backward(loss_of(engine, 0))
    with pytest.raises(xds.UsageError, match="part of the engine's model"):
        part.zero_grad()
    engine.module[0][1].zero_grad()  # it has no parameters
    nn.Sequential(engine.module).zero_grad()  # not a part: torch's own
    engine.step()
    same(values(engine), trained(stage, 1))
    engine.destroy()
    assert not {"zero_grad", "step"} & (vars(engine.module).keys() | vars(engine.optimizer).keys())
    engine.module.zero_grad()


def copies(stage: int) -> None:
    engine = engine_of(stage, optimizer=torch.optim.AdamW)
    engine.backward(loss_of(engine, 0))
    for make in (copy.deepcopy, *([] if stage == 3 else [lambda x: pickle.loads(pickle.dumps(x))])):
        with xds.zero.GatheredParameters(list(engine.module.parameters())):
            other = make(engine.module[0])
        other(torch.ones(1, 8)).sum().backward()
        other.zero_grad()
        assert other[0].weight.grad is None
    copy.deepcopy(engine.optimizer).zero_grad()
    engine.step()
    engine.destroy()


# -- optimizer.step -------------------------------------------------------------------------------------------


def as_plain(stage: int, each: int) -> None:
    """Norms and parameters are those of plain PyTorch: SGD without clipping shows a factor on gradients."""
    engine = engine_of(stage, accumulation=each)
    norms = []
    for number in range(3 * each):
        loss = loss_of(engine, number)
        engine.backward(loss) if number % 2 else loss.backward()
        engine.optimizer.step()
        if (number + 1) % each == 0:
            norms.append(engine.get_global_grad_norm())
            engine.optimizer.zero_grad()
    model, ranks = model_of(), range(dist.get_world_size())
    wanted = plain(
        model,
        3,
        lambda step: [batch_of(each * step + at, rank) for at in range(each) for rank in ranks],
        lambda output: output.square().mean(),
        optimizer="SGD",
        **OPTIONS,
    )
    assert norms == pytest.approx([step.norm for step in wanted], rel=1e-5)
    for one, other in zip(values(engine), model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    engine.destroy()


def updates(stage: int, make: Any) -> None:
    engine = engine_of(stage, optimizer=make)
    for number in range(3):
        engine.optimizer.zero_grad()
        engine.backward(loss_of(engine, number))
        engine.optimizer.step()
    assert (engine.global_steps, engine.was_step_applied()) == (3, True)
    same(values(engine), trained(stage, 3, optimizer=make))
    engine.destroy()


def with_a_closure(stage: int) -> None:
    engine = engine_of(stage)
    losses = []

    def closure() -> Tensor:
        engine.optimizer.zero_grad()
        loss = loss_of(engine, len(losses))
        engine.backward(loss)
        return loss

    for _ in range(2):
        with torch.no_grad():
            losses.append(engine.optimizer.step(closure))
    assert losses[0].item() != losses[1].item()
    same(values(engine), trained(stage, 2))
    engine.destroy()


def accumulates(stage: int) -> None:
    """A call after each micro-batch, and one for all: the plain loop with optimizer.zero_grad() after it."""
    for each in (1, 2):
        engine = engine_of(stage, gradient_accumulation_steps=2)
        for number in range(4):
            engine.backward(loss_of(engine, number))
            if (number + 1) % each == 0:
                engine.optimizer.step()
                assert engine.was_step_applied() == bool(number % 2)
                engine.optimizer.zero_grad()
                engine.module.zero_grad()
        assert (engine.global_steps, engine.micro_steps) == (2, 4)
        same(values(engine), trained(stage, 2, each=2))
        engine.destroy()


def both(stage: int) -> None:
    """One update where a loop calls both, in both orders, and the schedule as by engine.step()."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.05}}
    wanted = trained(stage, 3, scheduler=schedule)
    for first in ("step", "optimizer"):
        engine = engine_of(stage, scheduler=schedule)
        for number in range(3):
            engine.backward(loss_of(engine, number))
            (engine if first == "step" else engine.optimizer).step()
            (engine.optimizer if first == "step" else engine).step()
        assert engine.global_steps == 3
        same(values(engine), wanted)
        engine.destroy()


def torch_step(stage: int) -> None:
    """A schedule of torch, made before and after, of an optimizer that changes its groups in every step."""
    model = model_of()
    given = Counting(model.parameters(), lr=0.1)
    before = torch.optim.lr_scheduler.StepLR(given, 2)
    engine = engine_of(stage, model, optimizer=given, zero_allow_untested_optimizer=True)
    after = torch.optim.lr_scheduler.StepLR(given, 2)
    for number in range(4):
        given.step()  # without gradients
        engine.backward(loss_of(engine, number))
        given.step()
        before.step()
        after.step()
    assert given.param_groups[0]["count"] == 4
    assert given.param_groups[0]["lr"] == pytest.approx(0.1**5)
    engine.destroy()


class Counting(torch.optim.SGD):
    """Counts its steps, with and without gradients."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def at_several_stages() -> None:
    for stage in (0, 3):
        callers(stage, None)
        in_an_accumulation(stage)
    for stage in (1, 3):
        accumulates(stage)
        updates(stage, torch.optim.AdamW)
        as_plain(stage, each=stage)
        of_a_part(stage)
        copies(stage)
    callers(2, torch.optim.AdamW)
    both(1)
    with_a_closure(2)
    torch_step(2)


def test_torchs_calls_do_what_they_do_in_torch() -> None:
    run_ranks(at_several_stages, 2)


def warnings_of(call: Callable[[xds.Engine], None], **more: Any) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("xds")
    logger.addHandler(handler)
    engine = engine_of(1, **more)
    found.clear()
    try:
        for number in range(4):
            engine.backward(loss_of(engine, number))
            call(engine)
    finally:
        logger.removeHandler(handler)
        engine.destroy()
    return found


def said() -> None:
    def engine_first(engine: xds.Engine) -> None:
        engine.step()
        engine.optimizer.step()

    def optimizer_first(engine: xds.Engine) -> None:
        engine.optimizer.step()
        engine.step()

    def schedule(engine: xds.Engine) -> None:
        engine.step()
        engine.lr_scheduler.step()

    def schedule_in_torchs_way(engine: xds.Engine) -> None:
        engine.optimizer.step()
        engine.lr_scheduler.step()

    def half(engine: xds.Engine) -> None:
        engine.step()
        engine.optimizer.zero_grad()

    one = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}
    for call, more, text in (
        (engine_first, {}, "optimizer.step() without gradients"),
        (optimizer_first, {}, "engine.step() after optimizer.step()"),
        (schedule, one, "lr_scheduler.step() was called"),
        (half, {"gradient_accumulation_steps": 2}, "zero_grad() after 1 of 2 micro-batches"),
        (schedule_in_torchs_way, one, ""),
        (lambda engine: engine.step(), one, ""),
    ):
        found = warnings_of(call, **more)
        assert len(found) == bool(text), found
        assert not found or found[0].startswith(text)


def test_what_would_count_twice_is_said_once() -> None:
    run_ranks(said, 1)
