"""Bad input: each gives one sentence with setting, value, need and remedy, on every rank, and nothing hangs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks
from models import build, micro_batch
from runs import config

import xds


def config_of(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {**config(stage), **more}


def frozen() -> Any:
    return build("plain").requires_grad_(False)


def twice() -> None:
    model = build("plain")
    xds.initialize(model, config_of())
    xds.initialize(model, config_of())


def no_optimizer() -> None:
    xds.initialize(build("plain"), config_of(optimizer=None))


def used_optimizer() -> None:
    model = build("plain")
    optimizer = torch.optim.AdamW(model.parameters())
    model(micro_batch(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    xds.initialize(model, config_of(optimizer=None), optimizer=optimizer)


def loss_of(engine: Any) -> torch.Tensor:
    return engine(micro_batch(0, 0, 2))


def vector_loss() -> None:
    engine = xds.initialize(build("plain"), config_of())
    engine.backward(loss_of(engine) * torch.ones(3))


def loss_without_graph() -> None:
    engine = xds.initialize(build("plain"), config_of())
    engine.backward(loss_of(engine).detach())


def loss_is_a_number() -> None:
    xds.initialize(build("plain"), config_of()).backward(1.5)  # type: ignore[arg-type]


def step_without_backward() -> None:
    engine = xds.initialize(build("plain"), config_of())
    loss_of(engine)
    engine.step()


def step_twice() -> None:
    engine = xds.initialize(build("plain"), config_of())
    engine.backward(loss_of(engine))
    engine.step()
    engine.step()


def step_in_no_sync() -> None:
    engine = xds.initialize(build("plain"), config_of())
    with engine.no_sync():
        engine.backward(loss_of(engine))
        engine.step()


def nan_loss() -> None:
    """Only rank 0 sees a NaN; every rank is told, and the engine goes on."""
    engine = xds.initialize(build("plain"), config_of(stage=2))
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
    engine = xds.initialize(build("plain"), config_of())
    engine.destroy()
    engine.destroy()
    loss_of(engine)


def meta_model() -> None:
    with torch.device("meta"):
        model = build("mixed_shapes")  # has a parameter of its own, which no reset_parameters makes
    xds.initialize(model, config_of())


def stranger_in_groups() -> None:
    stranger = torch.nn.Parameter(torch.zeros(3))
    xds.initialize(build("plain"), config_of(), model_parameters=[stranger])


def no_batches() -> None:
    xds.initialize(build("plain"), config_of()).train_batch()


def wrong_unit() -> None:
    zero = {"stage": 3, "units": ["NoSuchBlock"]}
    xds.initialize(build("plain"), config_of(zero_optimization=zero))


def no_config() -> None:
    xds.initialize(build("plain"))


def impossible_batch() -> None:
    sizes = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
    xds.initialize(build("plain"), {**config_of(), **sizes})


def two_mistakes() -> None:
    sizes = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
    xds.initialize(build("plain"), {**config_of(optimizer=None), **sizes})


def shape_seeing_optimizer() -> None:
    model = build("plain")
    optimizer = torch.optim.Adafactor(model.parameters())
    xds.initialize(model, config_of(stage=1, optimizer=None), optimizer=optimizer)


BAD = {
    "nothing_to_train": "this engine only infers: every parameter of its model was frozen",
    "twice": "already belongs to another engine: call destroy",
    "no_optimizer": 'optimizer is missing: write e.g. {"type": "AdamW"',
    "used_optimizer": "AdamW has already taken steps",
    "vector_loss": "must be a scalar tensor; reduce it with .mean()",
    "loss_without_graph": "a loss without a graph",
    "loss_is_a_number": "needs the loss, a scalar tensor",
    "step_without_backward": "engine.step() without engine.backward(loss)",
    "step_twice": "engine.step() without engine.backward(loss)",
    "step_in_no_sync": "engine.step() inside no_sync()",
    "nan_loss": "the gradient norm over all ranks is nan",
    "destroyed": "this engine was destroyed",
    "meta_model": "on the meta device: no reset_parameters() to make initial values with",
    "stranger_in_groups": "that is not a parameter of the model",
    "no_batches": "train_batch() without data_iter",
    "wrong_unit": "no module of the model has this class name",
    "no_config": "xds.initialize needs a config",
    "impossible_batch": "train_batch_size",
    "shape_seeing_optimizer": "Adafactor: this optimizer may use the shape",
}


def nothing_to_train() -> None:
    xds.initialize(frozen(), config_of()).step()


def complain(names: list[str]) -> dict[str, str]:
    said = {}
    for name in names:
        try:
            globals()[name]()
            said[name] = "no complaint"
        except xds.XdsError as error:
            said[name] = str(error)
    return said


def test_each_mistake_gives_one_sentence_on_every_rank() -> None:
    for said in run_new_ranks(complain, 2, [*BAD, "two_mistakes"]):
        first, *problems = said["two_mistakes"].splitlines()
        assert first == "config: 2 problems"
        assert "optimizer is missing" in problems[0] and "train_batch_size = 7" in problems[1]
        for name, sentence in BAD.items():
            assert sentence in said[name], (name, said[name])
            assert "\n" not in said[name].strip(), name


def fail_in_the_middle(stage: int, path: str) -> str:
    """Rank 1 dies between forward and backward; rank 0 must be told, not wait."""
    engine = xds.initialize(build("plain"), config_of(stage=stage))
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
        engine = xds.initialize(build("plain"), config_of(stage=stage))
        with pytest.raises(ValueError, match="boom"):
            engine.backward(Bomb.apply(loss_of(engine)))
        engine.backward(loss_of(engine))
        engine.step()
        want = xds.initialize(build("plain"), config_of(stage=stage))
        want.backward(loss_of(want))
        want.step()
        assert engine.get_global_grad_norm() == want.get_global_grad_norm()


def test_an_exception_in_backward_leaves_a_clean_engine() -> None:
    run_new_ranks(raising_backward, 2)
