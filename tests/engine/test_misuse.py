"""Arguments of a wrong type: one sentence that names the argument, the value and the need; nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import run_ranks
from torch import nn

import xds
from xds.utils.arguments import shown, whole

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
