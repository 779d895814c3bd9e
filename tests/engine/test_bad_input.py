"""Bad input: each gives one sentence with setting, value, need and remedy, on every rank, and nothing hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks, run_ranks
from models import build, micro_batch
from runs import config

import xds
from xds.ops.watch import sentinel


def started(model: Any = None, **more: Any) -> Any:
    stage = more.pop("stage", 0)
    return xds.initialize(build("plain") if model is None else model, config(stage) | more)


def loss_of(engine: Any) -> torch.Tensor:
    return engine(micro_batch(0, 0, 2))


def twice() -> None:
    engine = started()
    xds.initialize(engine.module, config())


def used_optimizer() -> None:
    model = build("plain")
    optimizer = torch.optim.AdamW(model.parameters())
    model(micro_batch(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    xds.initialize(model, config() | {"optimizer": None}, optimizer=optimizer)


def shape_seeing_optimizer() -> None:
    model = build("plain")
    optimizer = torch.optim.Adafactor(model.parameters())
    xds.initialize(model, config(1) | {"optimizer": None}, optimizer=optimizer)


def vector_loss() -> None:
    engine = started()
    engine.backward(loss_of(engine) * torch.ones(3))


def loss_without_graph() -> None:
    engine = started()
    engine.backward(loss_of(engine).detach())


def step_without_backward() -> None:
    engine = started()
    loss_of(engine)
    engine.step()


def step_twice() -> None:
    engine = started()
    engine.backward(loss_of(engine))
    engine.step()
    engine.step()


def step_in_no_sync() -> None:
    engine = started()
    with engine.no_sync():
        engine.backward(loss_of(engine))
        engine.step()


def nan_loss() -> None:
    """Only rank 0 sees a NaN; every rank is told, and the engine goes on."""
    engine = started(stage=2)
    before = [p.detach().clone() for p in engine.module.parameters()]
    loss = loss_of(engine)
    engine.backward(loss * float("nan") if dist.get_rank() == 0 else loss)
    try:
        engine.step()
    except xds.XdsError:
        assert all(map(torch.equal, before, engine.module.parameters()))
        engine.backward(loss_of(engine))
        engine.step()
        assert engine.was_step_applied()
        raise


def destroyed() -> None:
    engine = started()
    engine.destroy()
    engine.destroy()
    loss_of(engine)


def meta_model() -> None:
    with torch.device("meta"):
        model = build("mixed_shapes")  # has a parameter of its own, which no reset_parameters makes
    started(model)


def stranger_in_groups() -> None:
    stranger = torch.nn.Parameter(torch.zeros(3))
    xds.initialize(build("plain"), config(), model_parameters=[stranger])


SIZES = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
UNITS = {"stage": 3, "units": ["NoSuchBlock"]}
BAD: dict[str, Callable[[], Any]] = {  # what the sentence says
    "this engine only infers: every parameter of its model was frozen": lambda: started(
        build("plain").requires_grad_(False)
    ).step(),
    "already belongs to another engine: call destroy": twice,
    'optimizer is missing: write e.g. {"type": "AdamW"': lambda: started(optimizer=None),
    "AdamW has already taken steps": used_optimizer,
    "Adafactor: this optimizer may use the shape": shape_seeing_optimizer,
    "must be a scalar tensor; reduce it with .mean()": vector_loss,
    "a loss without a graph": loss_without_graph,
    "needs the loss, a scalar tensor": lambda: started().backward(1.5),
    "engine.step() without engine.backward(loss)": step_without_backward,
    "step() without engine.backward(loss)": step_twice,
    "engine.step() inside no_sync()": step_in_no_sync,
    "the gradient norm over all ranks is nan": nan_loss,
    "this engine was destroyed": destroyed,
    "on the meta device: no reset_parameters() to make initial values with": meta_model,
    "that is not a parameter of the model": stranger_in_groups,
    "train_batch() without data_iter": lambda: started().train_batch(),
    "no module of the model has this class name": lambda: started(zero_optimization=UNITS),
    "xds.initialize needs a config": lambda: xds.initialize(build("plain")),
    "train_batch_size = 7": lambda: started(**SIZES),
}


def complaint(mistake: Callable[[], Any]) -> str:
    try:
        mistake()
    except xds.XdsError as error:
        return str(error)
    return "no complaint"


def complain() -> None:
    first, *problems = complaint(lambda: started(optimizer=None, **SIZES)).splitlines()
    assert first == "config: 2 problems"
    assert "optimizer is missing" in problems[0] and "train_batch_size = 7" in problems[1]
    for sentence, mistake in BAD.items():
        said = complaint(mistake)
        assert sentence in said and "\n" not in said.strip(), (sentence, said)


def test_each_mistake_gives_one_sentence_on_every_rank() -> None:
    run_ranks(complain, 2)


def fail_in_the_middle(stage: int, path: str) -> str:
    """Rank 1 dies between forward and backward; rank 0 must be told, not wait."""
    sentinel.PATIENCE_SECONDS = 0.5
    engine = xds.initialize(build("plain"), config(stage, watch={"heartbeat_seconds": 0.25}))
    loss = loss_of(engine)
    if dist.get_rank() == 1:
        os._exit(7)
    try:
        engine.backward(loss)
        engine.step()
    except xds.XdsError as error:
        Path(path).write_text(str(error))
        os._exit(0)
    return "not told"


def test_a_rank_that_fails_is_reported_on_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died with exit code"):
        run_new_ranks(fail_in_the_middle, 2, 3, str(tmp_path / "told"))
    assert "Another rank stopped" in (tmp_path / "told").read_text()


def raising_backward() -> None:
    """An exception in backward leaves an engine that can go on."""

    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("boom")

    for stage in (0, 2):
        engine = xds.initialize(build("plain"), config(stage))
        with pytest.raises(ValueError, match="boom"):
            engine.backward(Bomb.apply(loss_of(engine)))
        engine.backward(loss_of(engine))
        engine.step()
        want = xds.initialize(build("plain"), config(stage))
        want.backward(loss_of(want))
        want.step()
        assert engine.get_global_grad_norm() == want.get_global_grad_norm()


def test_an_exception_in_backward_leaves_a_clean_engine() -> None:
    run_ranks(raising_backward, 2)
