"""The bytes that a step sends equal the theory exactly, for every stage, number of ranks and accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from helpers import run_ranks
from models import build, micro_batch
from runs import config

import xds


def sent(stage: int, accumulation: int, reuse: int) -> dict[str, Any]:
    """The bytes of the second step on this rank, and the sizes that the theory uses."""
    world = dist.get_world_size()
    zero = {"stage3_max_reuse_distance": reuse}
    given = config(stage, samples=1, accumulation=accumulation, zero=zero)
    engine = xds.initialize(build("plain"), given)
    before: dict[str, int] = {}
    for step in range(2):
        before = engine.bytes_sent()
        for micro_step in range(accumulation):
            engine.backward(engine(micro_batch(step, micro_step, 1)))
            engine.step()
    after = engine.bytes_sent()
    units = engine._sharded.units
    sizes = {unit.name: unit.most_numel for unit in units}
    engine.destroy()
    names = [name for name in sizes if name]
    kept = sizes[""] + (sum(sizes[name] for name in names) if reuse else sizes[names[-1]])
    return {
        "sent": {kind: after[kind] - before.get(kind, 0) for kind in after},
        "numel": sum(sizes.values()),
        "kept": kept,
        "world": world,
    }


def theory(stage: int, k: int, numel: int, kept: int, world: int) -> int:
    """e = 4 bytes, f = (world - 1) / world; see docs/design/collectives.md."""
    passes = {0: 2 * numel, 1: 2 * numel, 2: (k + 1) * numel, 3: k * (3 * numel - kept)}[stage]
    return 4 * passes * (world - 1) // world


CASES = [(0, 1, 0), (1, 4, 0), (2, 4, 0), *((3, k, reuse) for k in (1, 4) for reuse in (0, 10**9))]


def count() -> list[dict[str, Any]]:
    return [sent(*case) for case in CASES]


def test_counted_bytes_equal_theory() -> None:
    world = 3
    for per_rank in run_ranks(count, world):
        for (stage, k, _), got in zip(CASES, per_rank, strict=True):
            want = theory(stage, k, got["numel"], got["kept"], world)
            control = got["sent"].pop("control", 0)
            # the norm, flags, the weights and losses
            assert control == 32 * (world - 1), (stage, k)
            assert sum(got["sent"].values()) == want, (stage, k, got)


def sent_after_no_sync(stage: int) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of a step of one backward, and of one whose first of two backwards was held back."""
    engine = xds.initialize(build("plain"), config(stage, samples=1))
    found = []
    for holds in (False, True):
        before = engine.bytes_sent()
        if holds:
            with engine.no_sync():
                engine.backward(engine(micro_batch(0, 0, 1)))
        engine.backward(engine(micro_batch(0, 1, 1)))
        engine.step()
        after = engine.bytes_sent()
        found.append({kind: after[kind] - before.get(kind, 0) for kind in after})
    engine.destroy()
    return found[0], found[1]


def test_gradients_that_were_held_back_are_sent_once() -> None:
    for stage in (1, 2):
        for plain, held in run_ranks(sent_after_no_sync, 2, stage):
            assert plain["reduce_scatter"] == held["reduce_scatter"] > 0, stage


def refuse(engine: xds.Engine) -> None:
    with pytest.raises(xds.UsageError, match="Loss scaling is required"):
        engine(micro_batch(9, 9, 1)).backward()


def of_refused(stage: int, accumulation: int, places: tuple[int, ...]) -> Any:
    """Of three steps: bytes sent; gradients' bytes between steps and norms. Backwards at `places` are refused.

    places: numbers of backwards of each step, of which the last one comes after that of the last micro-batch.
    """
    given = config(stage, "fp16", samples=1, accumulation=accumulation)
    engine = xds.initialize(build("plain"), given)
    found, sent = [], 0
    for step in range(3):
        for micro_step in range(accumulation):
            if micro_step in places:
                refuse(engine)
            engine.backward(engine(micro_batch(step, micro_step, 1)))
            if micro_step + 1 in places and micro_step + 1 == accumulation:
                refuse(engine)
            engine.step()
        before, sent = sent, engine.bytes_sent()["reduce_scatter"]
        held_bytes = sum(bucket.held_bytes for bucket in engine._sharded.reduction.order)
        found.append((sent - before, held_bytes, engine.get_global_grad_norm()))
    engine.destroy()
    return found


def refused() -> None:
    for stage, accumulation in ((0, 1), (1, 1), (1, 2), (2, 2), (3, 1)):
        wanted = of_refused(stage, accumulation, ())
        for places in ((0,), (accumulation,), (0, accumulation)):
            assert of_refused(stage, accumulation, places) == wanted, (stage, accumulation, places)


def test_a_refused_backward_sends_and_holds_nothing() -> None:
    run_ranks(refused, 2)
