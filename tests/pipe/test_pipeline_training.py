"""Training in pipeline stages equals training in one process, and sends and holds the bytes of the theory.

fp32: loss and norm within 1e-6 relative a step. 1f1b at stages 0 and 1: masters bit-equal to those without a
pipeline. 16 bits: near the same precision without a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from gathered import Peak
from helpers import run_ranks
from pipeline_runs import LENGTH, WIDTH, Known, Model, batches, config_of, reference, worst
from runs import PRECISIONS
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import xds
from xds.ops.comm.collectives import Collectives
from xds.ops.comm.handles import Handle, Then

STEPS, COUNT, SAMPLES = 3, 4, 2
CLIP = 0.5
TOLERANCES = {"fp32": 1e-6, "bf16": 5e-3, "fp16": 1e-3}


@dataclass(frozen=True)
class Case:
    """How a model is trained. `pipe` = 1: without a pipeline."""

    pipe: int
    data: int
    stage: int
    schedule: str = "1f1b"
    precision: str = "fp32"
    kind: str = "plain"
    blocks: int = 4

    @property
    def world_size(self) -> int:
        return self.pipe * self.data

    @property
    def name(self) -> str:
        return (
            f"{self.pipe}x{self.data}-zero{self.stage}-{self.schedule}-{self.precision}-{self.kind}"
        )

    @property
    def is_exact(self) -> bool:
        """Its masters are bit-equal to those without a pipeline."""
        one_order = self.schedule == "1f1b" and self.stage <= 1
        # what stages share is sent, so in 16 bits it is rounded once more
        sends_more = self.precision != "fp32" and self.kind != "frozen_first"
        return one_order and not sends_more and self.kind not in ("tied", "clipped")

    def config(self) -> dict[str, Any]:
        changes = dict(PRECISIONS[self.precision])
        if self.precision == "fp16":
            changes = {"fp16": {"enabled": True, "initial_scale_power": 4}}
        if self.kind == "clipped":
            changes["gradient_clipping"] = CLIP
        if self.kind == "checkpointed":
            changes["activation_checkpointing"] = {"enabled": True}
        zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1}
        pipeline: dict[str, Any] = {"schedule": self.schedule} if self.pipe > 1 else {}
        if self.kind == "compiled":
            changes["compile"] = {"enabled": True, "backend": "eager"}
            if self.pipe > 1:
                pipeline["partition"] = [0, self.blocks, self.blocks]
        return config_of(self.pipe, COUNT, zero=zero, pipeline=pipeline, **changes)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        # "alone": a head that is known to be called after the blocks may be a stage of its own
        model = (Known if self.kind in ("alone", "compiled") else Model)(
            self.blocks, tied=self.kind == "tied"
        )
        part = self.blocks // 4 + 1  # more than a stage of four
        if self.kind == "frozen_first":
            freeze = [model.embed, *model.blocks[:part]]
            model.position.requires_grad_(False)
        elif self.kind == "frozen_last":
            freeze = [*model.blocks[-part:], model.norm, model.head]
        else:
            freeze = []
        for module in freeze:
            module.requires_grad_(False)
        return model


@dataclass(frozen=True)
class Result:
    """Loss and norm of each step, and the masters after the last one that this rank knows."""

    steps: list[tuple[float, float]]
    masters: dict[str, Tensor]

    def unequal(self, other: Result) -> list[str]:
        """Names of the masters of both that are not bit-equal."""
        names = sorted({*self.masters} & {*other.masters})
        return [n for n in names if not torch.equal(self.masters[n], other.masters[n])]


def run(case: Case) -> Result:
    """On each rank of warm ranks."""
    engine = xds.initialize(case.model(), case.config())
    found = []
    for step in range(STEPS):
        loss = engine.train_batch(iter(batches(step, engine.dp_rank, COUNT)))
        found.append((loss.item(), engine.get_global_grad_norm() or 0.0))
    masters = engine.full_state_dict(rank0_only=False, full_precision=True)
    engine.destroy()
    return Result(found, masters)


@cache
def without_pipeline(case: Case) -> Result:
    """The same data ranks, ZeRO stage and precision, without a pipeline."""
    plain = replace(case, pipe=1, schedule="1f1b")
    result: Result = run_ranks(run, case.data, plain)[0]
    return result


@cache
def one_process(data: int, kind: str, blocks: int) -> list[tuple[float, float]]:
    """Loss and norm of each step of torch alone, fp32."""
    clip = CLIP if kind == "clipped" else 0.0
    return reference(Case(1, data, 0, kind=kind, blocks=blocks).model(), STEPS, data, COUNT, clip)


SHARP = [  # every value of every axis once
    Case(2, 1, 0, "1f1b", "fp32", "checkpointed"),
    Case(2, 2, 1, "1f1b", "fp32", "frozen_last", 8),
    Case(2, 2, 2, "zero_bubble", "fp32", "tied"),
    Case(2, 2, 3, "zbv", "fp32", "clipped"),
    Case(2, 2, 0, "1f1b", "bf16", "frozen_first", 8),
    Case(2, 2, 3, "dualpipev", "fp16", "plain"),
    Case(4, 1, 1, "interleaved_1f1b", "fp32", "tied", 8),
    Case(2, 1, 3, "gpipe", "bf16", "plain"),
    Case(4, 1, 3, "1f1b", "fp32", "alone", 2),
    Case(2, 2, 2, "zbv", "fp32", "alone", 2),
    Case(2, 1, 1, "interleaved_1f1b", "bf16", "alone", 2),
    Case(2, 1, 0, "1f1b", "fp32", "compiled"),
]


@pytest.mark.parametrize("case", SHARP, ids=lambda case: case.name)
@pytest.mark.quick(
    "2x1-zero0-1f1b-fp32-checkpointed",
    "2x2-zero2-zero_bubble-fp32-tied",
    "2x2-zero3-dualpipev-fp16-plain",
    "4x1-zero1-interleaved_1f1b-fp32-tied",
    "2x2-zero2-zbv-fp32-alone",
    "2x1-zero0-1f1b-fp32-compiled",
)
def test_steps_equal_those_of_one_process(case: Case) -> None:
    results: list[Result] = run_ranks(run, case.world_size, case)
    first = results[0]
    assert all(result.steps == first.steps for result in results)
    plain = without_pipeline(replace(case, pipe=1, schedule="1f1b"))
    expected = plain.steps
    if case.precision == "fp32":
        expected = one_process(case.data, case.kind, case.blocks)
    assert worst(first.steps, expected) <= TOLERANCES[case.precision]
    assert {name for result in results for name in result.masters} == {*plain.masters}
    for rank, result in enumerate(results):
        assert not any(result.unequal(other) for other in results[:rank]), rank
        assert not case.is_exact or result.unequal(plain) == [], rank


# -- bytes --------------------------------------------------------------------------------------------------
#
# f = (n - 1) / n for the n ranks of a buffer; sums over the padded buffers of a rank's stage. A step sends
# 2 e numel f, and the leaves of each micro-batch once forward and once back over each boundary.

FLAT = tuple[int, int, int, bool]  # elements, bytes of one, ranks, in the root unit


@dataclass(frozen=True)
class Counted:
    """One rank's bytes of a step by kind, its flat buffers, its micro-batches in flight.

    held: the most micro-batches of which inputs that had arrived were in memory.
    """

    sent: dict[str, int]
    flats: list[FLAT]
    in_flight: int
    held: int


def watch_arrived(channel: Any) -> list[int]:
    """How many inputs are in memory, each time that one has arrived."""
    take, arrived, counts = channel.take_forward, [], []

    def watched(stage: int, micro_batch: int) -> Any:
        flow = take(stage, micro_batch)
        arrived.append(StorageWeakRef(flow.leaves[0].untyped_storage()))
        counts.append(sum(not storage.expired() for storage in arrived))
        return flow

    channel.take_forward = watched
    return counts


def count(case: Case, reduce: str) -> Counted:
    config = case.config()
    config["pipeline"]["reduce"] = reduce
    engine = xds.initialize(case.model(), config)
    held = watch_arrived(engine._batches._pipeline.channel)
    seen = []
    for step in range(3):  # the first sends headers as well
        engine.train_batch(iter(batches(step, engine.dp_rank, COUNT, SAMPLES)))
        seen.append(engine.bytes_sent())
    sent = {kind: seen[2][kind] - seen[1][kind] for kind in seen[2]}
    flats = [
        (flat.layout.numel, flat.dtype.itemsize, flat.collectives.world_size, unit.is_root)
        for unit in engine._sharded.units
        for flat in unit.params
    ]
    in_flight = engine._batches._executor.max_in_flight
    found = Counted(sent, flats, in_flight, max(held, default=0))
    engine.destroy()
    return found


def check_sent(found: Counted, case: Case, rank: int, reductions: int = 1) -> None:
    shares = [(numel * size * (n - 1) // n, is_root) for numel, size, n, is_root in found.flats]
    # stage 0 gathers the sums of gradients, which are fp32; other stages gather parameters
    wide = 2 if case.stage == 0 and case.precision != "fp32" else 1
    assert found.sent["all_gather"] == wide * sum(share for share, _ in shares)
    expected = sum(share * (1 if is_root else reductions) for share, is_root in shares)
    assert found.sent["reduce_scatter"] == expected
    element = 4 if case.precision == "fp32" else 2
    flow = COUNT * SAMPLES * LENGTH * WIDTH * element
    stage = rank // case.data
    assert found.sent.get("activations", 0) == (flow if stage < case.pipe - 1 else 0)
    assert found.sent.get("gradients", 0) == (flow if stage else 0)
    assert found.sent.get("header", 0) == 0


def check(case: Case, reduce: str = "step") -> None:
    for rank, found in enumerate(run_ranks(count, case.world_size, case, reduce)):
        each = reduce == "micro_batch" and case.stage >= 2
        check_sent(found, case, rank, COUNT if each else 1)
        assert found.in_flight == min(COUNT, case.pipe - rank // case.data)
        assert found.held == (found.in_flight if rank >= case.data else 0)


def test_a_step_reduces_and_gathers_once_and_each_micro_batch_sends_a_multiple() -> None:
    check(Case(2, 2, 1, kind="tied"))
    check(Case(2, 2, 2), "micro_batch")


def most_sent(count: int, evaluates: bool) -> int:
    """How many tensors that this rank has sent, or sends, are in memory at most at once, of a few sizes."""
    engine = xds.initialize(Case(2, 1, 0).model(), config_of(2, count))
    storages, send, most = list[StorageWeakRef](), Collectives.send, 0

    def held(self: Collectives, tensor: Tensor, *args: Any, **how: Any) -> Handle:
        nonlocal most
        if how["kind"] != "header":
            storages.append(StorageWeakRef(tensor.untyped_storage()))
        most = max(most, sum(not each.expired() for each in storages))
        # as gloo and NCCL do until somebody waits
        return Then(send(self, tensor, *args, **how), lambda: None, kept=tensor)

    with mock.patch.object(Collectives, "send", held):
        for step in range(2):
            run_batch = engine.eval_batch if evaluates else engine.train_batch
            run_batch(iter(batches(step, 0, count)))
    engine.destroy()
    return most


def test_memory_of_what_is_sent_does_not_grow_with_the_micro_batches() -> None:
    for evaluates in (False, True):
        few, many = (run_ranks(most_sent, 2, count, evaluates) for count in (2, 8))
        assert few == many
        assert max(few) <= 2 * 2  # of two micro-batches the values and the mask, or their gradients


def peak_of_a_stage(max_live_numel: int) -> tuple[int, int, int]:
    """The most gathered elements of a step, those of the root and two blocks, those of the stage."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1}
    limits = {"stage3_max_live_parameters": max_live_numel, "stage3_prefetch_bucket_size": 0}
    config = config_of(2, COUNT, zero=zero | limits | {"stage3_max_reuse_distance": 0})
    engine = xds.initialize(Model(8), config)
    peak = Peak(engine)
    engine.train_batch(iter(batches(0, engine.dp_rank, COUNT)))
    *blocks, root = [unit.most_numel for unit in engine._sharded.units]
    found = peak.numel, root + 2 * max(blocks), root + sum(blocks)
    engine.destroy()  # gathers all
    return found


def test_a_stage_above_the_limit_of_live_parameters_is_gathered_block_by_block() -> None:
    held = run_ranks(peak_of_a_stage, 4, 10**9)
    assert all(peak == whole for peak, _, whole in held)
    least = min(whole for *_, whole in held) - 1
    assert all(peak <= blocks for peak, blocks, _ in run_ranks(peak_of_a_stage, 4, least))
