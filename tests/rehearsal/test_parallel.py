"""Pipelines, slices, sequences on a CUDA device that is host memory. See stand_in.py."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from device_ranks import ranks
from helpers import run_processes
from pipeline_runs import Model, batches
from test_rehearsal import config_of as config_of_one
from test_rehearsal import waits
from torch import Tensor
from torch.utils._pytree import tree_map

pytestmark = pytest.mark.slow  # by default test_rehearsal, _offload, _decisions and _models run

STEPS, COUNT = 4, 4
FIRST = 2  # waits are counted from here on: shapes are known, and the clock of samples runs


@dataclass(frozen=True)
class Trained:
    """What a rank has seen. in_steps: waits of the host in each step; in_micro_batches: those before `step`."""

    losses: list[float]
    norms: list[float]
    values: dict[str, Tensor]
    in_steps: list[int]
    in_micro_batches: int = 0
    first_in_pipeline: bool = True


def config_of(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    return config_of_one(stage, precision, COUNT) | {"train_micro_batch_size_per_gpu": 2} | more


def counted(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of `call`, and how often the host waits in it."""
    before = sum(waits().values())
    found = call()
    return found, sum(waits().values()) - before


def values_of(engine: Any) -> dict[str, Tensor]:
    whole = engine.full_state_dict(rank0_only=False, full_precision=True)
    return {name: value.cpu() for name, value in whole.items()}


def trained(
    engine: Any, steps: int, losses_of: Callable[[int], Iterable[Callable[[], Tensor]]]
) -> Trained:
    """Train; `losses_of(step)` has for each micro-batch a call that returns its loss. Ends the engine."""
    losses, norms, in_steps, in_micro_batches = [], [], [], 0

    def micro_batch(loss_of: Callable[[], Tensor]) -> Tensor:
        loss = loss_of()
        engine.backward(loss)
        return loss.detach()

    for step in range(steps):
        total, num_waits = [], 0
        for loss_of in losses_of(step):
            loss, found = counted(partial(micro_batch, loss_of))
            total.append(loss)
            in_micro_batches += found if step >= FIRST else 0
            num_waits += counted(engine.step)[1]
        losses.append(torch.stack(total).mean().item())
        norms.append(engine.get_global_grad_norm() or 0.0)
        in_steps.append(num_waits)
    found = Trained(losses, norms, values_of(engine), in_steps, in_micro_batches)
    engine.destroy()
    return found


def assert_same(found: list[Trained], expected: list[Trained], precision: str) -> None:
    """Both have the same numbers, up to rounding."""
    near = 1e-5 if precision == "fp32" else 2e-2
    for here, there in zip(found, expected, strict=True):
        assert here.losses == pytest.approx(there.losses, rel=near, abs=near / 10)
        assert here.norms == pytest.approx(there.norms, rel=near, abs=near / 10)
        assert {*here.values} == {*there.values}
        for name, value in here.values.items():
            near_values = 1e-4 if precision == "fp32" else 3e-2
            assert torch.allclose(value, there.values[name], near_values, near_values), name


# -- pipelines ----------------------------------------------------------------------------------------------


def train_in_stages(config: dict[str, Any], kind: str) -> Trained:
    import xds

    torch.manual_seed(0)
    engine = xds.initialize(Model(4, tied=kind == "tied"), config)
    losses, norms, in_steps = [], [], []
    for step in range(STEPS):
        data = iter(batches(step, engine.dp_rank, COUNT))
        loss, num_waits = counted(lambda data=data: engine.train_batch(data))
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm() or 0.0)
        in_steps.append(num_waits)
    losses += [  # the first has headers: of another call, without gradients
        engine.eval_batch(iter(batches(STEPS, engine.dp_rank, COUNT))).item() for _ in range(2)
    ]
    found = Trained(
        losses, norms, values_of(engine), in_steps, first_in_pipeline=engine.is_first_stage()
    )
    engine.destroy()
    return found


PIPELINES = [
    (2, 0, "1f1b", "fp32", "tied"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (2, 3, "zbv", "bf16", "plain"),
            (2, 2, "interleaved_1f1b", "fp16", "plain"),
            (4, 3, "1f1b", "bf16", "tied"),
        )
    ),
]


@pytest.mark.parametrize(("world_size", "stage", "schedule", "precision", "kind"), PIPELINES)
def test_a_pipeline_has_the_numbers_of_the_cpu_and_waits_before_a_step_and_at_its_end(
    world_size: int, stage: int, schedule: str, precision: str, kind: str
) -> None:
    config = config_of(stage, precision, pipeline={"stages": 2, "schedule": schedule})
    found = ranks(world_size).run(train_in_stages, config, kind)
    assert_same(found, run_processes(train_in_stages, world_size, config, kind), precision)
    for each in found:
        assert math.isfinite(each.losses[-1])
        # what the first stage has read, where this is another one; whether all ranks go on; the norm
        assert set(each.in_steps[FIRST:]) == {2 if each.first_in_pipeline else 3}


# -- slices and sequences -----------------------------------------------------------------------------------


def train_whole(name: str, config: dict[str, Any]) -> Trained:
    """Forward, backward and step over one of the models of tensor_cases."""
    from tensor_cases import batches, build

    import xds

    engine = xds.initialize(build(name, config.get("sequence_parallel_size", 1)), config)

    def losses_of(step: int) -> Iterator[Callable[[], Tensor]]:
        for batch in batches(name, step, engine.dp_rank):
            moved = tree_map(lambda tensor: tensor.to(engine.device), batch)
            if isinstance(moved, dict):
                yield lambda moved=moved: engine(**moved).loss
            else:
                yield lambda moved=moved: engine(*moved)

    return trained(engine, STEPS, losses_of)


# in each forward transformers' own code looks at masks, positions and attributes of a tensor
OF_TRANSFORMERS = {"gpt": 0, "llama": 1, "qwen3": 1, "gpt2": 3}
TENSOR, OVERLAPPED = {"tp_size": 2}, {"tp_size": 2, "tp_overlap_comm": True}
RANKS_OF_A_MODEL = [
    (2, 3, "bf16", "llama", {"tensor_parallel": OVERLAPPED}),
    (2, 2, "fp32", "llama", {"sequence_parallel_size": 2}),
    (2, 2, "bf16", "gpt", {"tensor_parallel": TENSOR}),
    (4, 3, "bf16", "llama", {"sequence_parallel_size": 2, "tensor_parallel": TENSOR}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "stage", "precision", "name", "more"), RANKS_OF_A_MODEL)
def test_slices_and_sequences_have_the_numbers_of_the_cpu_and_wait_for_the_norm_alone(
    world_size: int, stage: int, precision: str, name: str, more: dict[str, Any]
) -> None:
    config = config_of(stage, precision, **more)
    found = ranks(world_size).run(train_whole, name, config)
    assert_same(found, run_processes(train_whole, world_size, name, config), precision)
    for each in found:
        assert each.in_micro_batches == OF_TRANSFORMERS[name] * COUNT * (STEPS - FIRST)
        assert each.in_steps[FIRST:] == [1] * (STEPS - FIRST)


# -- rings --------------------------------------------------------------------------------------------------


def train_in_a_ring(model: tuple[Any, ...], kind: str, config: dict[str, Any]) -> Trained:
    """More sequence ranks than heads. kind: of the batch, see test_sequence_training.py."""
    sys.path.append(str(Path(__file__).parents[1] / "tensor"))
    from test_sequence_training import batch, build

    import xds

    engine = xds.initialize(build(*model), config)
    losses, norms, in_steps, in_micro_batches = [], [], [], 0
    for step in range(STEPS):
        given = tree_map(lambda x: x.to(engine.device), batch(kind, step, engine.dp_rank))
        loss = engine(**given).loss
        _, found = counted(partial(engine.backward, loss))
        in_micro_batches += found if step >= FIRST else 0
        in_steps.append(counted(engine.step)[1])
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm() or 0.0)
    found = Trained(losses, norms, values_of(engine), in_steps, in_micro_batches)
    engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage", "precision"),
    [("packed", 3, "bf16")],
)
def test_rings_have_the_numbers_of_the_cpu(kind: str, stage: int, precision: str) -> None:
    more = {"sequence_parallel_size": 2, "gradient_accumulation_steps": 1}
    args = (("llama", 1, 1), kind, config_of(stage, precision, **more))
    found = ranks(2).run(train_in_a_ring, *args)
    assert_same(found, run_processes(train_in_a_ring, 2, *args), precision)
    for each in found:
        assert each.in_micro_batches == 0
        assert each.in_steps[FIRST:] == [1] * (STEPS - FIRST)


# -- stages of a model of transformers ----------------------------------------------------------------------


def train_padded_in_stages(config: dict[str, Any]) -> Trained:
    from tensor_cases import batches as of_llama
    from tensor_cases import build

    import xds

    engine = xds.initialize(build("llama"), config)
    losses, norms, in_steps = [], [], []
    for step in range(STEPS):
        data = list(of_llama("llama", step, engine.dp_rank))
        for batch in data:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][0, 9:] = 0
        loss, num_waits = counted(partial(engine.train_batch, iter(data)))
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm() or 0.0)
        in_steps.append(num_waits)
    found = Trained(
        losses, norms, values_of(engine), in_steps, first_in_pipeline=engine.is_first_stage()
    )
    engine.destroy()
    return found


def test_stages_look_at_all_masks_of_a_step_with_one_wait() -> None:
    config = config_of(1, "fp32", pipeline={"stages": 2})
    found = ranks(2).run(train_padded_in_stages, config)
    assert_same(found, run_processes(train_padded_in_stages, 2, config), "fp32")
    for each in found:
        own = 3 if each.first_in_pipeline else 4
        of_transformers = 2 * COUNT  # its code looks at the mask twice in each forward
        assert set(each.in_steps[FIRST:]) == {own + of_transformers}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (3, {"pipeline": {"stages": 2, "schedule": "zero_bubble"}, "tensor_parallel": OVERLAPPED}),
        (1, {"pipeline": {"stages": 2}, "sequence_parallel_size": 2}),
    ],
)
def test_stages_of_slices_and_sequences_have_the_numbers_of_the_cpu(
    stage: int, more: dict[str, Any]
) -> None:
    config = config_of(stage, "fp32", **more)
    found = ranks(4).run(train_padded_in_stages, config)
    assert_same(found, run_processes(train_padded_in_stages, 4, config), "fp32")
    # transformers' own code looks at masks of the model, and of whole sequences
    each_forward = 2 * COUNT * len({"tensor_parallel", "sequence_parallel_size"} & {*more})
    if (
        "sequence_parallel_size" in more
    ):  # masks of whole sequences, and of what flows a header each time
        each_forward += 3 * COUNT
    for each in found:
        own = 3 if each.first_in_pipeline else 4
        assert max(each.in_steps[FIRST:]) <= own + each_forward
