"""What a pipeline cannot do: one sentence on every rank, and no wait."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import on_busy_machines, run_new_ranks, run_processes, run_ranks
from pipeline_runs import WIDTH, Model, batches, config_of
from torch import Tensor, nn

import xds
from xds.utils.errors import XdsError

COUNT = 4


def said(call: Callable[[], Any]) -> str:
    """The message of the error that `call` raises; "" if it raises none."""
    try:
        call()
    except XdsError as error:
        return f"{error}"
    return ""


def engine_of(model: nn.Module | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    count = changes.pop("count", COUNT)
    return xds.initialize(model or Model(4), config_of(2, count, **changes))


def bad_batches() -> list[str]:
    """Each is refused on every rank; then the engine goes on."""
    engine = engine_of()
    is_first_column = engine.dp_rank == 0
    good = batches(0, engine.dp_rank, COUNT)
    given = {
        "ends early": good[:2],
        "an object": [{"x": object()}] * COUNT,
        "sparse": [{"x": torch.eye(3).to_sparse()}] * COUNT,
        "keys": [{3: torch.eye(3)}] * COUNT,
    }
    found = [
        said(lambda b=bad: engine.train_batch(iter(b if is_first_column else good)))
        for bad in given.values()
    ]
    found.append(said(lambda: engine.train_batch(None if is_first_column else iter(good))))
    found.append(said(lambda: engine.eval_batch(None if is_first_column else iter(good))))
    found.append(said(lambda: engine.train_batch(iter(good))))
    engine.destroy()
    return found


def test_batches_that_one_rank_cannot_use_stop_no_other() -> None:
    by_rank = run_ranks(bad_batches, 4)
    expected = ("ended after 2 of 4", "is a object", "make it dense", "must be text")
    expected += ("train_batch: data_iter = None", "eval_batch: data_iter = None")
    for rank, messages in enumerate(by_rank):
        assert messages[-1] == ""
        for message, part in zip(messages, expected, strict=False):
            assert (part if rank % 2 == 0 else "rank 0 could not use its batches") in message


def refused_calls() -> list[str]:
    engine = engine_of()
    batch = batches(0, 0, 1)[0]
    loss = torch.ones((), requires_grad=True)
    calls = {
        "forward": lambda: engine(*batch),
        "backward": lambda: engine.backward(loss),
        "step": engine.step,
        "no_sync": engine.no_sync,
        "clip_grad_norm": lambda: engine.clip_grad_norm(1.0),
        "scale": lambda: engine.scale(loss),
        "set_gradient_accumulation_boundary": lambda: engine.set_gradient_accumulation_boundary(
            True
        ),
    }
    remedy = "call engine.train_batch() or engine.eval_batch(data_iter), not"
    found = [name for name, call in calls.items() if f"{remedy} {name}()" not in said(call)]
    found += [] if "another pipeline rank" in said(lambda: engine.module(*batch)) else ["module"]
    engine.destroy()
    return found


def test_calls_of_single_micro_batches_say_what_to_call() -> None:
    assert run_ranks(refused_calls, 2) == [[], []]


def refused_models() -> None:
    def is_refused(text: str, model: nn.Module, stages: int = 2, **changes: Any) -> None:
        count = changes.pop("count", COUNT)
        assert text in said(lambda: xds.initialize(model, config_of(stages, count, **changes)))

    is_refused("needs at least 2 micro-batches", Model(4), count=1)
    is_refused("has no list of blocks", nn.Linear(3, 3))
    is_refused("4 stages (with chunks) for 2 layers", Model(2), 4)
    many = {"schedule": "interleaved_1f1b", "chunks": 10**9}  # it did not return
    is_refused("more stages than the model has layers", Model(4), pipeline=many)
    is_refused("14 stages", Model(4), pipeline={"schedule": "auto", "chunks": 7})
    model = Model(4)
    xds.initialize(model, config_of(2, COUNT), group=dist.group.WORLD).destroy()
    is_refused("build the model again", model)


def test_models_and_configs_that_cannot_be_cut() -> None:
    run_ranks(refused_models, 4)


def other_number_of_samples() -> list[Any]:
    engine = engine_of()
    engine.train_batch(iter(batches(0, engine.dp_rank, COUNT)))
    engine.set_train_batch_size(2 * 6 * engine.dp_world_size)
    engine.train_batch(iter(batches(1, engine.dp_rank, 6)))
    counts = [engine.global_steps, engine.micro_steps, engine.global_samples]
    engine.set_train_batch_size(2 * engine.dp_world_size)
    message = said(lambda: engine.train_batch(iter(batches(2, engine.dp_rank, 1))))
    engine.destroy()
    return [counts, message]


def test_the_batch_size_changes_between_steps() -> None:
    for counts, message in run_ranks(other_number_of_samples, 2):
        assert counts == [2, COUNT + 6, 2 * (COUNT + 6)]
        assert "needs at least 2 micro-batches, not 1" in message


def overflow() -> list[Any]:
    """The loss overflows on the last stage alone: all stages skip."""
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    engine = engine_of(fp16=fp16, zero={"stage": 1})
    before = [param.detach().clone() for param in engine.module.parameters()]
    engine.train_batch(iter(batches(0, engine.dp_rank, COUNT)))
    after = list(engine.module.parameters())
    unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    found = [unchanged, engine.skipped_steps, engine.was_step_applied(), engine.loss_scale]
    engine.destroy()
    return found


def test_an_overflow_skips_the_step_on_all_stages() -> None:
    assert run_ranks(overflow, 2) == [[True, 1, False, 2.0**39]] * 2


def frozen_stage() -> list[Any]:
    model = Model(4)
    for part in (*model.blocks[2:], model.norm, model.head):
        part.requires_grad_(False)
    model.position.requires_grad_(False)
    engine = engine_of(model, zero={"stage": 2})
    losses = [engine.train_batch(iter(batches(0, 0, COUNT))).item() for _ in range(3)]
    held = engine.memory_plan()
    engine.destroy()
    return [losses[0] > losses[2], held["optimizer"] > 0]


def test_a_stage_may_be_all_frozen() -> None:
    assert run_ranks(frozen_stage, 2) == [[True, True], [True, False]]


class Broken(nn.Linear):
    """Ends its process."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        os._exit(3)


def broken_stage(folder: str) -> None:
    rank, model = dist.get_rank(), Model(4)
    model.blocks[3] = Broken(WIDTH, WIDTH)
    engine = engine_of(model)
    try:
        engine.train_batch(iter(batches(0, 0, COUNT)))
    except (XdsError, ValueError) as error:
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(str(error), file)


def test_a_rank_that_ends_is_named_with_its_stage(tmp_path: Any, monkeypatch: Any) -> None:
    seconds = on_busy_machines(4)
    monkeypatch.setenv("XDS_TIMEOUT_SECONDS", f"{seconds:g}")
    with pytest.raises(AssertionError):
        run_new_ranks(broken_stage, 2, str(tmp_path), timeout_seconds=seconds)
    message = json.loads((tmp_path / "0.json").read_text())
    assert "stage 1" in message and "rank 1" in message


# -- what one stage refuses, all ranks refuse, and say which rank it was and why ----------------------------


class Net(nn.Module):
    """Two blocks between an embedding, which is on the first stage, and a head, on the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 20, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class CannotBeBuilt(nn.Module):
    """A layer that cannot be built."""

    def __init__(self) -> None:
        super().__init__()
        if not torch.empty(0).is_meta:  # only its own stage builds it
            raise ValueError("no such layer")


def model_of(kind: str) -> nn.Module:
    if kind == "layer":
        from xds.pipe import LayerSpec, PipelineModule

        layers = [LayerSpec(nn.Linear, 8, 8), LayerSpec(CannotBeBuilt)]
        return PipelineModule(layers, loss_fn=nn.MSELoss(), partition_method="uniform")
    model: Any = Net()
    if kind == "max_norm":
        model.embed.max_norm = 1.0
    elif kind == "complex":
        model.blocks[1].phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    elif kind == "tiles":
        model.blocks[0].mlp = nn.Linear(8, 8)
    return model


def refused(kind: str) -> tuple[str, str]:
    """The class and the text of this rank's error."""
    torch.manual_seed(0)
    config = config_of(2, 2, zero={"stage": 1, "shared_parameters": kind == "max_norm"})
    if kind == "tiles":
        config["sequence"] = {"tiled_mlp": 4}
    try:
        xds.initialize(model_of(kind), config)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


REFUSED = [
    ("max_norm", 0, "UsageError", "max_norm of embed"),
    ("complex", 1, "UsageError", "complex parameters are not supported"),
    ("layer", 1, "ValueError", "no such layer"),
]


def test_a_refusal_reaches_the_other_stages() -> None:
    for kind, rank, name, text in REFUSED:
        found = run_ranks(refused, 2, kind)
        assert found[rank][0] == name and text in found[rank][1], kind
        kind_of_other, said = found[1 - rank]
        assert kind_of_other == "UsageError", kind
        assert f"xds.initialize failed on rank {rank}: " in said and text in said
    for name, said in run_ranks(refused, 2, "tiles"):  # each stage has seen the whole model
        assert name == "UsageError" and "has no module called mlp" in said


class Refuses(nn.Linear):
    """A layer that does not take its input."""

    def forward(self, x: Tensor) -> Tensor:
        raise xds.UsageError("no such input")


def refused_in_a_step(shared_memory: bool) -> str:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Refuses(8, 8)]
    model = xds.pipe.PipelineModule(layers, loss_fn=nn.MSELoss())
    config = config_of(3, COUNT) | {"communication": {"shared_memory": shared_memory}}
    engine = xds.initialize(model, config)
    batch = (torch.zeros(2, 8), torch.zeros(2, 8))
    found = said(lambda: engine.train_batch(iter([batch] * COUNT)))
    engine.destroy()
    return found


def test_a_refusal_in_a_step_ends_the_waits_of_the_other_stages() -> None:
    for run, shared_memory in ((run_processes, True), (run_new_ranks, False)):
        *others, own = run(refused_in_a_step, 3, shared_memory)
        assert own == "no such input"
        for one in others:
            assert "rank 2 raised xds.utils.errors.UsageError: no such input in train_batch" in one
            assert "Connection closed" in one
