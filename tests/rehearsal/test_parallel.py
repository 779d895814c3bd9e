"""Pipelines, slices, sequences, compressed messages on a CUDA device that is host memory. See stand_in.py.

On a device of each rank the messages are NCCL's. Where several ranks share one GPU, gloo carries them through
host memory: its stand-in refuses what gloo cannot do with tensors of a device, see `Gloo` in messages.py.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import ranks
from helpers import run_new_ranks, run_processes
from pipeline_runs import Model, batches
from placed_ranks import placed
from test_rehearsal import build, inputs_of, waits
from test_rehearsal import config_of as config_of_one
from torch import Tensor
from torch.utils._pytree import tree_map

from xds.ops.comm.config import Communication

pytestmark = pytest.mark.slow  # by default test_rehearsal.py runs

STEPS, COUNT = 4, 4
FIRST = 2  # waits are counted from here on: shapes are known, and the clock of samples runs
TENSOR, OVERLAPPED = {"tp_size": 2}, {"tp_size": 2, "tp_overlap_comm": True}


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


def trained_in_stages(engine: Any, data_of: Callable[[int], Iterable[Any]]) -> Trained:
    """The same with `train_batch`, and at the end two evaluations."""
    losses, norms, in_steps = [], [], []
    for step in range(STEPS):
        loss, num_waits = counted(lambda step=step: engine.train_batch(iter(data_of(step))))
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm() or 0.0)
        in_steps.append(num_waits)
    # the first has headers: of another call, without gradients
    losses += [engine.eval_batch(iter(data_of(STEPS))).item() for _ in range(2)]
    is_first = engine.is_first_stage()
    found = Trained(losses, norms, values_of(engine), in_steps, first_in_pipeline=is_first)
    engine.destroy()
    return found


def as_on_the_cpu(
    function: Callable[..., Trained], *args: Any, precision: str, gloo: bool = False, **nears: float
) -> list[Trained]:
    """What two ranks of the device find, compared with two of the CPU, up to rounding."""
    rel = nears.get("rel", 1e-5 if precision == "fp32" else 2e-2)
    found = ranks(2, gloo=gloo).run(function, *args)
    for here, there in zip(found, run_processes(function, 2, *args), strict=True):
        assert here.losses == pytest.approx(there.losses, rel=rel, abs=nears.get("abs", rel / 10))
        assert here.norms == pytest.approx(there.norms, rel=rel, abs=nears.get("abs", rel / 10))
        assert {*here.values} == {*there.values} and all(map(math.isfinite, here.losses))
        if not nears:
            near = 1e-4 if precision == "fp32" else 3e-2
            for name, value in here.values.items():
                assert torch.allclose(value, there.values[name], near, near), name
    return found


# -- pipelines ----------------------------------------------------------------------------------------------


def in_stages(config: dict[str, Any], kind: str) -> Trained:
    import xds

    torch.manual_seed(0)
    engine = xds.initialize(Model(4, tied=kind == "tied"), config)
    return trained_in_stages(engine, lambda step: batches(step, engine.dp_rank, COUNT))


@pytest.mark.parametrize(
    ("stage", "schedule", "precision", "kind", "gloo"),
    [
        (0, "1f1b", "fp32", "tied", False),
        (3, "zbv", "bf16", "plain", False),
        (2, "interleaved_1f1b", "fp16", "plain", False),
        (1, "1f1b", "fp32", "tied", True),
    ],
)
def test_a_pipeline_waits_before_a_step_and_at_its_end(
    stage: int, schedule: str, precision: str, kind: str, gloo: bool
) -> None:
    config = config_of(stage, precision, pipeline={"stages": 2, "schedule": schedule})
    for each in as_on_the_cpu(in_stages, config, kind, precision=precision, gloo=gloo):
        # what the first stage has read, where this is another one; whether all ranks go on; the norm
        expected = {2 if each.first_in_pipeline else 3}
        assert gloo or set(each.in_steps[FIRST:]) == expected


def padded_in_stages(config: dict[str, Any]) -> Trained:
    """Of a model of transformers."""
    import tensor_cases

    import xds

    engine = xds.initialize(tensor_cases.build("llama"), config)

    def data_of(step: int) -> Iterator[Any]:
        for batch in tensor_cases.batches("llama", step, engine.dp_rank):
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][0, 9:] = 0
            yield batch

    return trained_in_stages(engine, data_of)


def test_stages_look_at_all_masks_of_a_step_with_one_wait() -> None:
    config = config_of(1, "fp32", pipeline={"stages": 2})
    for each in as_on_the_cpu(padded_in_stages, config, precision="fp32"):
        own = 3 if each.first_in_pipeline else 4
        of_transformers = 2 * COUNT  # its code looks at the mask twice in each forward
        assert set(each.in_steps[FIRST:]) == {own + of_transformers}


# -- slices and sequences -----------------------------------------------------------------------------------


def whole(name: str, config: dict[str, Any]) -> Trained:
    """Forward, backward and step over one of the models of tensor_cases."""
    import tensor_cases

    import xds

    size = config.get("sequence_parallel_size", 1)
    engine = xds.initialize(tensor_cases.build(name, size), config)

    def losses_of(step: int) -> Iterator[Callable[[], Tensor]]:
        for batch in tensor_cases.batches(name, step, engine.dp_rank):
            moved = tree_map(lambda tensor: tensor.to(engine.device), batch)
            if isinstance(moved, dict):
                yield lambda moved=moved: engine(**moved).loss
            else:
                yield lambda moved=moved: engine(*moved)

    return trained(engine, STEPS, losses_of)


# `waits`: without a cache, as sequence ranks compute, transformers looks for packed rows in each forward


@pytest.mark.parametrize(
    ("stage", "precision", "name", "more", "gloo", "waits"),
    [
        (3, "bf16", "llama", {"tensor_parallel": OVERLAPPED}, False, 0),
        (2, "fp32", "llama", {"sequence_parallel_size": 2}, False, 1),
        (2, "bf16", "gpt", {"tensor_parallel": TENSOR}, True, 0),
    ],
)
def test_slices_and_sequences_wait_for_the_norm_alone(
    stage: int, precision: str, name: str, more: dict[str, Any], gloo: bool, waits: int
) -> None:
    config = config_of(stage, precision, **more)
    for each in as_on_the_cpu(whole, name, config, precision=precision, gloo=gloo):
        if not gloo:
            assert each.in_micro_batches == waits * COUNT * (STEPS - FIRST)
            assert each.in_steps[FIRST:] == [1] * (STEPS - FIRST)


def in_a_ring(config: dict[str, Any]) -> Trained:
    """More sequence ranks than heads."""
    sys.path.append(str(Path(__file__).parents[1] / "tensor"))
    import test_sequences as rings

    import xds

    model = rings.build("llama", 1, 1)
    model.config.use_cache = False  # with a cache packed documents are refused
    engine = xds.initialize(model, config)

    def losses_of(step: int) -> Iterator[Callable[[], Tensor]]:
        given = rings.batch("packed", step, engine.dp_rank)
        moved = tree_map(lambda x: x.to(engine.device), given)
        yield lambda: engine(**moved).loss

    return trained(engine, STEPS, losses_of)


def test_rings_have_the_numbers_of_the_cpu() -> None:
    more = {"sequence_parallel_size": 2, "gradient_accumulation_steps": 1}
    for each in as_on_the_cpu(in_a_ring, config_of(3, "bf16", **more), precision="bf16"):
        assert each.in_steps[FIRST:] == [1] * (STEPS - FIRST)


# -- compressed messages ------------------------------------------------------------------------------------


def of_vectors(config: dict[str, Any]) -> Trained:
    """Of a model whose gradients are exact. Each rank is a host."""
    import xds

    with placed([*range(dist.get_world_size())]):
        engine = xds.initialize(build(), config)

    def losses_of(step: int) -> Iterator[Callable[[], Tensor]]:
        for micro in range(2):
            inputs = inputs_of(engine, 2 * step + micro)
            yield lambda inputs=inputs: engine(inputs).float().square().mean()

    return trained(engine, 2 * STEPS, losses_of)


QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 3}}


@pytest.mark.parametrize(
    ("stage", "precision", "more", "gloo"),
    [
        (2, "bf16", {"optimizer": ONE_BIT, "gradient_clipping": 0.0}, False),
        (3, "bf16", {"zero_optimization": QUANTIZED}, False),
        (2, "fp32", {"zero_optimization": {"zero_quantized_gradients": True}}, True),
    ],
)
def test_compressed_messages_have_the_numbers_of_the_cpu(
    stage: int, precision: str, more: dict[str, Any], gloo: bool
) -> None:
    config = config_of(stage, precision, gradient_accumulation_steps=2)
    zero = config["zero_optimization"] | more.get("zero_optimization", {})
    # a sign that flips changes many weights a little
    near = 1e-3 if precision == "fp32" else 5e-2
    config |= more | {"zero_optimization": zero}
    found = as_on_the_cpu(of_vectors, config, precision=precision, gloo=gloo, rel=near, abs=near)
    for here in found:
        assert gloo or (here.in_micro_batches, here.in_steps[-3:]) == (0, [1, 1, 1])


# -- several ranks on one GPU -------------------------------------------------------------------------------


def values(device: torch.device, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device)


def call_all(device_type: str, dtype: torch.dtype) -> dict[str, Any]:
    """The results of every collective, and the bytes."""
    from xds.ops.comm.opening import open_collectives

    device = torch.device(device_type)
    group = open_collectives(dist.group.WORLD, device, None, Communication(shared_memory=False))
    rank, world = group.rank, group.world_size
    flat = values(device, 48 * world, seed=rank).to(dtype)
    found: dict[str, Tensor] = {}

    found["sum"] = torch.ones(48, device=device)
    group.reduce_scatter(flat, found["sum"], add=True, buffer=0, kind="reduce").wait()
    found["gathered"] = flat.clone()
    own = group.shard_of(found["gathered"])
    group.all_gather(found["gathered"], own, buffer=1, kind="gather").wait()
    found["reduced"] = flat.clone()
    group.all_reduce(found["reduced"], what="x", kind="tensor").wait()
    found["small sum"] = flat[:5].clone()
    group.sum(found["small sum"], what="x", kind="tensor")
    found["whole"] = flat.clone()
    if group.sums_whole(found["whole"], group.shard_of(found["whole"])):
        kinds = ("reduce", "gather")
        shard = group.shard_of(found["whole"])
        for handle in group.sum_whole(found["whole"], shard, buffer=2, kinds=kinds):
            handle.wait()
    sent = [flat[: 3 * peer + 1].clone() for peer in range(world)]
    parts = [flat.new_empty(3 * rank + 1) for _ in range(world)]
    group.all_to_all(parts, sent, what="x", kind="tokens").wait()
    found["exchanged"] = torch.cat(parts)
    bounds = [(0, 7), (7, 20), *[(20, 20)] * (world - 2)]
    found["collected"] = flat.new_zeros(20)
    group.collect(found["collected"], flat[slice(*bounds[rank])], bounds)
    found["scattered"] = flat.new_zeros(bounds[rank][1] - bounds[rank][0])
    group.scatter(flat[:20] if rank == 1 else None, found["scattered"], bounds, source=1)
    served = flat.clone() if rank == 0 else None
    group.serve(served, group.shard_of(flat), [0], buffer=3)
    found["served"] = torch.zeros(1) if served is None else served
    found["table"] = group.gather_small(flat[:2].double())
    found["all"] = flat.clone()
    group.broadcast(found["all"], source=1)
    message = values(device, 3, 5, seed=9).to(dtype)
    if rank == 0:
        group.send(message, 1, what="x", kind="pipe").wait()
    if rank == 1:
        found["message"] = torch.empty_like(message)
        group.receive(found["message"], 0, what="x").wait()
    group.barrier()
    host = {name: value.cpu() for name, value in found.items()}
    return {"values": host, "sent": group.sent_bytes, "kind": type(group.backend).__name__}


def assert_equal(found: list[dict[str, Any]], on_cpu: list[dict[str, Any]]) -> None:
    for here, there in zip(found, on_cpu, strict=True):
        assert (here["kind"], there["kind"]) == ("StagedGlooBackend", "GlooBackend")
        assert here["sent"] == there["sent"]
        assert {*here["values"]} == {*there["values"]}
        for name, value in here["values"].items():
            assert torch.equal(value, there["values"][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_collective_has_the_bits_and_bytes_of_the_cpu(dtype: torch.dtype) -> None:
    found = ranks(2, gloo=True).run(call_all, "cuda", dtype)
    assert_equal(found, run_processes(call_all, 2, "cpu", dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_ranks_on_a_gpu_have_the_bits_and_bytes_of_the_cpu(dtype: torch.dtype) -> None:
    found, plain = (run_new_ranks(call_all, 3, device, dtype) for device in ("cuda", "cpu"))
    assert_equal(found, plain)


def across_streams() -> list[float]:
    """Start on one stream and wait on another, while the first still reads what is received into."""
    from xds.ops.comm.opening import open_collectives

    group = open_collectives(dist.group.WORLD, torch.device("cuda"))
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    target, found = torch.zeros(1024, device="cuda"), []
    torch.cuda.synchronize()
    for turn in range(4):
        if group.rank == turn % 2:
            with torch.cuda.stream(first):
                sent = torch.full((1024,), float(turn), device="cuda")
                group.send(sent, 1 - group.rank, what="x", kind="pipe").wait()
                sent.fill_(-1.0)
            continue
        with torch.cuda.stream(first):
            before = target + 1
            handle = group.receive(target, 1 - group.rank, what="x")
        with torch.cuda.stream(second):
            handle.wait()
            after = target * 2
        torch.cuda.synchronize()
        found += [float(before.mean()), float(after.mean())]
    return found


def test_a_message_may_be_waited_for_on_another_stream() -> None:
    assert ranks(2, gloo=True).run(across_streams) == [[1.0, 2.0, 2.0, 6.0], [1.0, 0.0, 1.0, 4.0]]


def lines() -> list[str]:
    """What is logged where groups are opened."""
    from xds.ops.comm import opening

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    opening.log.addHandler(handler)
    try:
        world = opening.open_collectives(dist.group.WORLD, torch.device("cuda"))
        part = opening.PartOf(world, (0, 1))
        opening.open_collectives(dist.group.WORLD, torch.device("cuda"), part)
    finally:
        opening.log.removeHandler(handler)
    return told


def test_the_first_rank_says_once_that_messages_go_through_the_host() -> None:
    first, other = ranks(2, gloo=True).run(lines)
    assert len(first) == 1 and "gloo sends messages of GPUs through host memory" in first[0]
    assert other == []
