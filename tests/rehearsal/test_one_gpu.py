"""Several ranks on one GPU: gloo carries their messages, through host memory. Rehearsed, see stand_in.py.

gloo's stand-in refuses what gloo cannot do with tensors of a device: see `Gloo` in messages.py.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import ranks
from helpers import run_new_ranks, run_processes
from test_compressed import (
    ADAM,
    GRADS,
    WEIGHTS,
    assert_near,
    config_with,
    one_bit,
    train_vector,
)
from test_parallel import (
    OVERLAPPED,
    TENSOR,
    assert_same,
    config_of,
    train_in_a_ring,
    train_in_stages,
    train_whole,
)
from torch import Tensor

from xds.ops.comm.config import Communication

pytestmark = pytest.mark.slow  # by default test_rehearsal, _offload, _decisions and _models run

MESSAGES = Communication(shared_memory=False)


def values(device: torch.device, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device)


def call_all(device_type: str, dtype: torch.dtype) -> dict[str, Any]:
    """The results of every collective, and the bytes."""
    from xds.ops.comm.opening import open_collectives

    device = torch.device(device_type)
    group = open_collectives(dist.group.WORLD, device, None, MESSAGES)
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
        group.send(message, 1, number=4, what="x", kind="pipe").wait()
    if rank == 1:
        found["message"] = torch.empty_like(message)
        group.receive(found["message"], 0, number=4, what="x").wait()
    group.barrier()
    host = {name: value.cpu() for name, value in found.items()}
    return {"values": host, "sent": group.sent_bytes, "kind": type(group).__name__}


def assert_equal(found: list[dict[str, Any]], on_cpu: list[dict[str, Any]]) -> None:
    for here, there in zip(found, on_cpu, strict=True):
        assert (here["kind"], there["kind"]) == ("Staged", "PeerToPeer")
        assert here["sent"] == there["sent"]
        assert {*here["values"]} == {*there["values"]}
        for name, value in here["values"].items():
            assert torch.equal(value, there["values"][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2])
def test_every_collective_has_the_bits_and_bytes_of_the_cpu(world: int, dtype: torch.dtype) -> None:
    found = ranks(world, gloo=True).run(call_all, "cuda", dtype)
    assert_equal(found, run_processes(call_all, world, "cpu", dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_ranks_on_a_gpu_have_the_bits_and_bytes_of_the_cpu(dtype: torch.dtype) -> None:
    assert_equal(
        run_new_ranks(call_all, 3, "cuda", dtype), run_new_ranks(call_all, 3, "cpu", dtype)
    )


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
                group.send(sent, 1 - group.rank, number=turn, what="x", kind="pipe").wait()
                sent.fill_(-1.0)
            continue
        with torch.cuda.stream(first):
            before = target + 1
            handle = group.receive(target, 1 - group.rank, number=turn, what="x")
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


def on_both(world_size: int, function: Any, *args: Any) -> tuple[Any, Any]:
    """The results on the device, and on the CPU."""
    found = ranks(world_size, gloo=True).run(function, *args)
    return found, run_processes(function, world_size, *args)


@pytest.mark.parametrize(
    ("world_size", "stage", "schedule", "precision", "kind"),
    [
        (2, 1, "1f1b", "fp32", "tied"),
        pytest.param(2, 3, "zero_bubble", "bf16", "tied", marks=pytest.mark.slow),
    ],
)
def test_pipelines(world_size: int, stage: int, schedule: str, precision: str, kind: str) -> None:
    config = config_of(stage, precision, pipeline={"stages": 2, "schedule": schedule})
    assert_same(*on_both(world_size, train_in_stages, config, kind), precision)


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "name", "more"),
    [
        (2, 2, "bf16", "gpt", {"tensor_parallel": TENSOR}),
        pytest.param(
            *(2, 3, "bf16", "llama", {"tensor_parallel": OVERLAPPED}), marks=pytest.mark.slow
        ),
        pytest.param(
            *(2, 2, "fp32", "llama", {"sequence_parallel_size": 2}), marks=pytest.mark.slow
        ),
        pytest.param(
            *(4, 3, "bf16", "llama", {"sequence_parallel_size": 2, "tensor_parallel": TENSOR}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_slices_and_sequences(
    world_size: int, stage: int, precision: str, name: str, more: dict[str, Any]
) -> None:
    config = config_of(stage, precision, **more)
    assert_same(*on_both(world_size, train_whole, name, config), precision)


@pytest.mark.slow
def test_rings() -> None:
    more = {"sequence_parallel_size": 2, "gradient_accumulation_steps": 1}
    config = config_of(3, "bf16", **more)
    assert_same(*on_both(2, train_in_a_ring, ("llama", 1, 1), "plain", config), "bf16")


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "more"),
    [
        (2, 2, "bf16", one_bit(ADAM)),
        (2, 2, "fp32", {"zero_optimization": GRADS}),
        pytest.param(2, 3, "bf16", {"zero_optimization": WEIGHTS | GRADS}, marks=pytest.mark.slow),
        pytest.param(4, 2, "fp32", {"zero_optimization": GRADS}, marks=pytest.mark.slow),
        pytest.param(
            4, 3, "fp16", {"zero_optimization": {"mics_shard_size": 2}}, marks=pytest.mark.slow
        ),
    ],
)
def test_compressed_messages(
    world_size: int, stage: int, precision: str, more: dict[str, Any]
) -> None:
    config = config_with(stage, precision, more)
    assert_near(*on_both(world_size, train_vector, config, 2), precision)
