"""Bad input: one sentence with setting, value, need and remedy, on every rank; nothing hangs or changes."""

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
from torch import nn

import xds
from xds.ops.watch import watcher
from xds.utils.arguments import shown, whole


def started(model: Any = None, **more: Any) -> Any:
    stage = more.pop("stage", 0)
    return xds.initialize(build("plain") if model is None else model, config(stage) | more)


def loss_of(engine: Any) -> torch.Tensor:
    return engine(micro_batch(0, 0, 2))


Call = Callable[[xds.Engine, torch.Tensor], Any]


def after_forward(call: Call, **more: Any) -> Callable[[], Any]:
    """Calls it with an engine and its loss."""

    def run() -> None:
        engine = started(**more)
        call(engine, loss_of(engine))

    return run


def of_script(kind: type[torch.optim.Optimizer], stage: int, takes_a_step: bool) -> None:
    model = build("plain")
    optimizer = kind(model.parameters())
    if takes_a_step:
        model(micro_batch(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    xds.initialize(model, config(stage) | {"optimizer": None}, optimizer=optimizer)


def nan_loss(engine: xds.Engine, loss: torch.Tensor) -> None:
    """Only rank 0 sees a NaN; every rank is told, and the engine goes on."""
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.backward(loss * float("nan") if dist.get_rank() == 0 else loss)
    try:
        engine.step()
    except xds.XdsError:
        assert all(map(torch.equal, before, engine.module.parameters()))
        engine.backward(loss_of(engine))
        engine.step()
        assert engine.was_step_applied()
        raise


def step_in_no_sync(engine: xds.Engine, loss: torch.Tensor) -> None:
    with engine.no_sync():
        engine.backward(loss)
        engine.step()


def destroyed() -> None:
    engine = started()
    engine.destroy()
    engine.destroy()
    loss_of(engine)


def meta_model() -> None:
    with torch.device("meta"):
        model = build("mixed_shapes")  # has a parameter of its own, which no reset_parameters makes
    started(model)


SIZES = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
UNITS = {"stage": 3, "units": ["NoSuchBlock"]}
BAD: dict[str, Callable[[], Any]] = {  # what the sentence says
    "this engine only infers: every parameter of its model was frozen": lambda: started(
        build("plain").requires_grad_(False)
    ).step(),
    "already belongs to another engine: call destroy": after_forward(
        lambda engine, _: xds.initialize(engine.module, config())
    ),
    'optimizer is missing: write e.g. {"type": "AdamW"': lambda: started(optimizer=None),
    "AdamW has already taken steps": lambda: of_script(torch.optim.AdamW, 0, True),
    "Adafactor: this optimizer may use the shape": lambda: of_script(
        torch.optim.Adafactor, 1, False
    ),
    "must be a scalar tensor; reduce it with .mean()": after_forward(
        lambda engine, loss: engine.backward(loss * torch.ones(3))
    ),
    "a loss without a graph": after_forward(lambda engine, loss: engine.backward(loss.detach())),
    "needs the loss, a scalar tensor": lambda: started().backward(1.5),
    "engine.step() without engine.backward(loss)": after_forward(lambda engine, _: engine.step()),
    "step() without engine.backward(loss)": after_forward(
        lambda engine, loss: (engine.backward(loss), engine.step(), engine.step())
    ),
    "engine.step() inside no_sync()": after_forward(step_in_no_sync),
    "the gradient norm over all ranks is nan": after_forward(nan_loss, stage=2),
    "this engine was destroyed": destroyed,
    "on the meta device: no reset_parameters() to make initial values with": meta_model,
    "clip_grad_norm(1.0) without gradients": lambda: started().clip_grad_norm(1.0),
    "that is not a parameter of the model": lambda: xds.initialize(
        build("plain"), config(), model_parameters=[torch.nn.Parameter(torch.zeros(3))]
    ),
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
    watcher.PATIENCE_SECONDS = 0.5
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


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(3, 3)
        self.head = nn.LazyLinear(3)


def initialize(model: Any = None, **given: Any) -> xds.Engine:
    return xds.initialize(nn.Linear(3, 3) if model is None else model, CONFIG, **given)


# what the message begins with -> what a script does
Calls = dict[str, Callable[[], Any]]


def initializations() -> Calls:
    return {
        "model = 3: must be a torch.nn.Module": lambda: initialize(3),
        "model = the class Linear: must be": lambda: initialize(nn.Linear),
        "model = a list: must be": lambda: initialize([nn.Linear(3, 3)]),
        "head.weight is one of 2 tensors": lambda: initialize(Lazy()),
        "optimizer = 3: must be": lambda: initialize(optimizer=3),
        "lr_scheduler = 3: must be": lambda: initialize(lr_scheduler=3),
        "collate_fn = 3: must be": lambda: initialize(training_data=[1], collate_fn=3),
        "group = 3: must be": lambda: initialize(group=3),
        "weights = 3: must be": lambda: initialize(weights=3),
        "model_parameters = 3: must be": lambda: initialize(model_parameters=3),
        "model_parameters, group 0 = 3: must": lambda: initialize(model_parameters=[3]),
        "model_parameters, group 1 = a dict: must": lambda: initialize(
            model_parameters=[{"params": []}, {"lr": 1.0}]
        ),
    }


def accesses(engine: xds.Engine) -> Calls:
    zero, weight, value = xds.zero, engine.module.weight, torch.ones(3, 3)
    complex_ = value.to(torch.complex64)
    return {
        "param = 'weight': must be": lambda: zero.get_full_param("weight"),
        "param = None: must be": lambda: zero.set_full_param(None, value),
        "param = a list: must be": lambda: zero.GatheredParameters([[]]).__enter__(),
        "param = 4: must be": lambda: zero.register_external_parameter(engine.module, 4),
        "set_full_param(weight): value = None": lambda: zero.set_full_param(weight, None),
        "set_full_param(weight): value = a Tensor": lambda: zero.set_full_param(weight, complex_),
        "set_full_grad(weight): value = 3.0": lambda: zero.set_full_grad(weight, 3.0),
        "set_full_optimizer_state(weight): value = 'exp_avg'": lambda: (
            zero.set_full_optimizer_state(weight, "exp_avg", value)
        ),
        "set_full_optimizer_state: key = None": lambda: zero.set_full_optimizer_state(
            weight, value, None
        ),
        "get_full_optimizer_state: key = a list": lambda: zero.get_full_optimizer_state(weight, []),
        "GatheredParameters: params = 3": lambda: zero.GatheredParameters(3),
        "GatheredParameters: modifier_rank = 'x'": lambda: zero.GatheredParameters(weight, "x"),
        "load_weights: model = 3": lambda: zero.load_weights(3, {}),
    }


def methods(engine: xds.Engine, folder: str) -> Calls:
    return {
        "set_train_micro_batch_size: micro_batch_size = 'x'": lambda: (
            engine.set_train_micro_batch_size("x")
        ),
        "set_train_micro_batch_size: micro_batch_size = 1.5": lambda: (
            engine.set_train_micro_batch_size(1.5)
        ),
        "set_train_batch_size: train_batch_size = 4.0": lambda: engine.set_train_batch_size(4.0),
        "set_train_batch_size: train_batch_size = None": lambda: engine.set_train_batch_size(None),
        "clip_grad_norm: max_norm = 'x'": lambda: engine.clip_grad_norm("x"),
        "clip_grad_norm: max_norm = None": lambda: engine.clip_grad_norm(None),
        "clip_grad_norm: max_norm = -1.0": lambda: engine.clip_grad_norm(-1.0),
        "clip_grad_norm: max_norm = nan": lambda: engine.clip_grad_norm(float("nan")),
        "train_batch: data_iter = a list": lambda: engine.train_batch([1, 2]),
        "eval_batch: data_iter = 3": lambda: engine.eval_batch(3),
        "eval_batch: num_micro_batches = 0": lambda: engine.eval_batch(iter([]), 0),
        "offload_states: include = 'hp_params'": lambda: engine.offload_states("hp_params"),
        "offload_states: include = 3": lambda: engine.offload_states(3),
        "weights = None: must be": lambda: engine.load_state_dict(None),
        "the state dict: weight = 3": lambda: engine.load_state_dict({"weight": 3}, strict=False),
        "save_checkpoint: client_state = a list": lambda: engine.save_checkpoint(
            folder, client_state=[1]
        ),
        "save_checkpoint: client_state = 'ab'": lambda: engine.save_checkpoint(
            folder, client_state="ab"
        ),
        "auto = a list: must be": lambda: xds.Config.load(CONFIG, auto=["optimizer.params.lr"]),
        "auto = a dict: must be": lambda: xds.Config.load(CONFIG, auto={3: 1}),
        "zero.Init: module = 3: must": lambda: xds.zero.Init(CONFIG, module=3),
        "layers = 3: must be": lambda: xds.pipe.PipelineModule(3),
        "num_stages = 'x': must be": lambda: xds.pipe.PipelineModule([nn.ReLU()], "x"),
        "tied_weight_attr = 3: must be": lambda: xds.pipe.TiedLayerSpec(
            "tied", nn.Linear, 1, 1, tied_weight_attr=3
        ),
        "run_in_tiles: sequences = 3": lambda: xds.tensor.run_in_tiles(abs, 3, tiles=1),
        "run_in_tiles: one of sequences = 3": lambda: xds.tensor.run_in_tiles(abs, [3], tiles=1),
        "run_in_tiles: others = 3": lambda: xds.tensor.run_in_tiles(
            abs, [torch.ones(1, 2)], tiles=1, others=3
        ),
        "save_dir = 3 is not": lambda: xds.newest_checkpoint(3),
        "dir = 3 is not": lambda: xds.get_fp32_state_dict(3),
    }


def refused(calls: Calls) -> list[str]:
    """What is wrong with the answers."""
    found = []
    for start, call in calls.items():
        try:
            call()
            found.append(f"{start}: accepted")
        except xds.UsageError as error:
            if not str(error).startswith(start) or "\n" in str(error):
                found.append(f"{start}: {error}")
        except Exception as error:
            found.append(f"{start}: {error!r}")
    return found


def misuse(folder: str) -> list[str]:
    torch.manual_seed(0)
    engine = initialize()
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    before = engine.state_dict()
    found = (
        refused(initializations()) + refused(accesses(engine)) + refused(methods(engine, folder))
    )
    after = engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    assert (engine.train_batch_size(), engine.global_steps) == (2, 2)
    engine.destroy()
    return found


def test_wrong_types(tmp_path) -> None:
    assert run_ranks(misuse, 1, str(tmp_path)) == [[]]
    assert not any(tmp_path.iterdir())


def test_a_state_that_is_no_tensor_may_be_left_out() -> None:
    model = nn.Linear(3, 3)
    state = {**model.state_dict(), "_extra_state": {"a": 1}}
    xds.zero.load_weights(model, {**state, 3: torch.ones(1)}, strict=False)


@pytest.mark.parametrize(
    "value", ["3", 3.0, True, None, torch.tensor(2.5), torch.tensor([1, 2]), 0]
)
def test_no_whole_number(value: Any) -> None:
    with pytest.raises(xds.UsageError, match=r"^n = .*: must be a whole number, at least 1$"):
        whole("n", value, 1)


def test_a_whole_number_of_another_library() -> None:
    assert whole("n", torch.tensor(3), 1) == 3


def test_long_values_are_cut() -> None:
    assert len(shown("x" * 9999)) == 60 and shown(nn.Linear) == "the class Linear"
