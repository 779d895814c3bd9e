"""Inputs of recomputed blocks in parts: numbers, bytes that are sent, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_cases import Case, batches, build
from warm_ranks import warm

import xds
from xds.offload import activations
from xds.pipe import channel
from xds.tensor import partition

RECOMPUTED = {"enabled": True}
PARTED = {"enabled": True, "partition_activations": True}


def train(case: Case, section: dict[str, Any]) -> tuple[list[Any], int, list[int]]:
    """Loss and norm of each step, bytes of gathers in the last one, elements of the parts that are kept."""
    plain, partition.MIN_NUMEL = partition.MIN_NUMEL, 1
    kept: list[int] = []
    cut = partition._Part.__init__

    def noted(self: Any, shape: torch.Size, values: torch.Tensor) -> None:
        kept.append(values.shape.numel())
        cut(self, shape, values)

    partition._Part.__init__ = noted  # type: ignore[method-assign]
    try:
        engine = xds.initialize(
            build(case.model), case.config() | {"activation_checkpointing": section}
        )
        found = []
        for step in range(3):
            del kept[:]
            before = engine.bytes_sent().get(partition.KIND, 0)
            loss = engine.train_batch(batches(case.model, step, engine.dp_rank))
            sent = engine.bytes_sent().get(partition.KIND, 0) - before
            found.append((loss.item(), engine.get_global_grad_norm()))
        engine.destroy()
    finally:
        partition.MIN_NUMEL = plain
        partition._Part.__init__ = cut  # type: ignore[method-assign]
    return found, sent, kept


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", 1, 1, 1, 2, 1),
        pytest.param(Case("llama", 1, 2, 1, 2, 3), marks=pytest.mark.slow),
        pytest.param(Case("gpt", 2, 1, 1, 2, 1), marks=pytest.mark.slow),
    ],
    ids=lambda case: case.name,
)
def test_parts_change_no_number_and_are_a_share(case: Case) -> None:
    whole = warm(case.mesh.size).run(train, case, RECOMPUTED)
    parts = warm(case.mesh.size).run(train, case, PARTED)
    for (steps, none, _), (found, sent, kept) in zip(whole, parts, strict=True):
        assert found == steps and none == 0
        numel = 2 * 12 * 32  # of the input of a block: samples, tokens, width
        assert set(kept) == {numel // 2}
        # each part goes to the other rank, in 4 bytes
        assert sent == 4 * sum(kept)


def train_on_host(case: Case) -> tuple[Any, int]:
    """`train`, and how many tensors went to the host."""
    plain, activations.MIN_BYTES = activations.MIN_BYTES, 1
    moved: list[int] = []
    note = activations._Moved.__init__

    def noted(self: Any, shape: torch.Size, *rest: Any) -> None:
        moved.append(shape.numel())
        note(self, shape, *rest)

    activations._Moved.__init__ = noted  # type: ignore[method-assign]
    try:
        found = train(case, PARTED | {"cpu_checkpointing": True})
    finally:
        activations.MIN_BYTES = plain
        activations._Moved.__init__ = note  # type: ignore[method-assign]
    return found, len(moved)


def test_parts_go_to_the_host() -> None:
    case = Case("llama", 1, 1, 1, 2, 1)
    parts = warm(case.mesh.size).run(train, case, PARTED)
    for (steps, sent, kept), (on_host, moved) in zip(
        parts, warm(case.mesh.size).run(train_on_host, case), strict=True
    ):
        assert on_host[0] == steps and on_host[1] == sent
        assert moved == 3 * len(kept)  # in three steps


def sent_between_stages(case: Case, section: dict[str, Any]) -> tuple[list[Any], dict[str, int]]:
    """Loss and norm of each step, and the bytes of the last one by kind."""
    engine = xds.initialize(build(case.model), case.config() | {"pipeline": section})
    found, sent = [], {}
    for step in range(3):
        before = engine.bytes_sent()
        loss = engine.train_batch(batches(case.model, step, engine.dp_rank))
        sent = {kind: size - before.get(kind, 0) for kind, size in engine.bytes_sent().items()}
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found, sent


@pytest.mark.parametrize(
    ("data", "schedule"),
    [
        (1, "1f1b"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, "zero_bubble"), (1, "zbv"))),
    ],
)
def test_tensor_ranks_send_their_share_to_the_next_stage(data: int, schedule: str) -> None:
    case = Case("gpt", 2, data, 1, 2, 1)
    stages = {"stages": 2, "schedule": schedule}
    whole = stages | {"pipe_partitioned": False, "grad_partitioned": False}
    plain = warm(case.mesh.size).run(sent_between_stages, case, whole)
    parts = warm(case.mesh.size).run(sent_between_stages, case, stages)
    for (steps, before), (found, after) in zip(plain, parts, strict=True):
        assert found == steps
        assert channel.JOINS not in before
        joined = 0
        for kind in ("activations", "gradients"):
            assert after.get(kind, 0) == before.get(kind, 0) // 2
            joined += (
                before.get(kind, 0) // 2
            )  # a rank receives as much as it sends in these schedules
        other = {
            kind: size for kind, size in before.items() if kind not in ("activations", "gradients")
        }
        assert {k: v for k, v in after.items() if k in other} == other
        assert after[channel.JOINS] == joined


def test_small_leaves_are_sent_whole() -> None:
    from xds.ops.comm.parts import EqualParts

    class Group:
        rank, world_size = 2, 3

    parts = EqualParts(Group(), "x")  # type: ignore[arg-type]
    assert [parts.numel_of(numel) for numel in (9, 8, 7)] == [3, 2, 1]
    assert parts.are_used((3, 1)) and not parts.are_used(()) and not parts.are_used((2,))
    assert parts.own(torch.arange(8.0)).tolist() == [6.0, 7.0]
