"""What may be in memory at once: gathered units and reductions in flight, under each limit of the config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gathered import Peak
from helpers import run_ranks
from runs import config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import xds
from xds.ops.comm.handles import Handle
from xds.zero.core.gather import num_kept
from xds.zero.core.reduction import REDUCTIONS_IN_FLIGHT

WIDTH, DEPTH = 32, 6
BLOCK, ROOT = WIDTH * WIDTH, WIDTH  # elements, for two ranks without padding
ALL = 10**9


class Model(nn.Module):
    """Blocks of one weight, and a scale outside of them. recomputes: reentrant checkpoints call them twice."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = recomputes
        self.scale = nn.Parameter(torch.ones(ROOT))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.recomputes else block(x)
        return x.square().mean()


def gathered(limits: dict[str, int], recomputes: bool = False) -> list[tuple[int, int]]:
    """For each of four steps: blocks that were in memory at once beside the root, and gathers of blocks."""
    zero = {f"stage3_{name}": value for name, value in limits.items()}
    engine = xds.initialize(Model(recomputes=recomputes), config(3, zero=zero))
    peak, found, sent = Peak(engine), [], 0
    for step in range(4):
        peak.numel = 0
        engine.backward(engine(torch.full((2, WIDTH), 1.0 + step)))
        engine.step()
        before, sent = sent, engine.bytes_sent()["all_gather"]
        found.append(((peak.numel - ROOT) // BLOCK, (sent - before) // (4 * BLOCK // 2)))
    engine.destroy()
    return found


# limits of the config; blocks at once, and how many a step gathers. Backward uses the last one again at once
GATHERED: list[tuple[dict[str, int], int, int]] = [
    ({"prefetch_bucket_size": 0, "max_reuse_distance": 0}, 1, 11),
    ({"prefetch_bucket_size": BLOCK, "max_reuse_distance": 0}, 2, 11),
    ({"prefetch_bucket_size": BLOCK - 1, "max_reuse_distance": 0}, 1, 11),
    ({"max_live_parameters": ROOT + 2 * BLOCK, "max_reuse_distance": 0}, 2, 11),
    ({"max_live_parameters": ROOT + 2 * BLOCK - 1, "max_reuse_distance": 0}, 1, 11),
    ({"max_reuse_distance": 4 * BLOCK, "prefetch_bucket_size": 0}, 3, 9),
    ({"max_reuse_distance": 4 * BLOCK - 1, "prefetch_bucket_size": 0}, 2, 10),
    ({"max_reuse_distance": ALL}, 6, 6),
    ({"max_reuse_distance": ALL, "max_live_parameters": 3 * BLOCK}, 3, 9),
]


def gathered_under_each() -> None:
    for limits, blocks, gathers in GATHERED:
        assert gathered(limits) == [(blocks, gathers)] * 4, limits
    # a recomputation gathers a block, and its gradients drop it, in each step
    limits = {"prefetch_bucket_size": 0, "max_reuse_distance": 0}
    assert gathered(limits, recomputes=True) == [(1, 12)] * 4


def test_no_more_is_gathered_at_once_than_the_limits_allow() -> None:
    run_ranks(gathered_under_each, 2)


def kept_each_time() -> None:
    """The bytes that stay gathered after forwards, each time that units are to be kept."""
    engine = xds.initialize(Model(recomputes=False), config(3))
    sharded, x = engine._sharded, torch.ones(2, WIDTH)
    first, *_, root = sharded.units
    limit_bytes = root.full_bytes + 3 * first.full_bytes
    ends = [sharded.end_keeping, sharded.gatherer.begin_update, sharded.end_keeping]
    for number, end in enumerate(ends):
        sharded.keep_used(limit_bytes)
        for _ in range(2):
            with torch.no_grad():
                engine(x)
            kept = [unit.full_bytes for unit in sharded.units if unit.is_unsharded]
            assert sum(kept) == limit_bytes, number
        end()
        assert not any(unit.is_unsharded for unit in sharded.units), number
    engine.destroy()


def test_units_that_are_kept_take_the_limit_each_time() -> None:
    run_ranks(kept_each_time, 2)


def gathered_in_each_backward() -> None:
    """Backward drops a block with a frozen parameter when it leaves it, also the second time."""
    model = Model(recomputes=False)
    model.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
    for block in model.blocks:
        block.bias.requires_grad_(False)
    zero = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    engine = xds.initialize(model, config(3, zero=zero))
    peak = Peak(engine)
    for step in range(2):
        loss = engine(torch.full((2, WIDTH), 1.0 + step))
        for retains in (True, False):
            peak.numel = 0
            engine.backward(loss, retain_graph=retains)
            assert peak.numel == ROOT + BLOCK + WIDTH, (step, retains)
        engine.step()
    engine.destroy()


def test_a_second_backward_holds_no_more_than_the_first() -> None:
    run_ranks(gathered_in_each_backward, 2)


@pytest.mark.parametrize(
    ("reuse_distance", "max_live_numel", "kept"),
    [
        (0, ALL, 1),
        (25, ALL, 2),
        (40, ALL, 3),
        (ALL, ALL, 4),
        (ALL, 29, 2),
        (ALL, 30, 3),
        (ALL, 9, 0),
    ],
)
def test_units_that_stay_until_backward(
    reuse_distance: int, max_live_numel: int, kept: int
) -> None:
    assert num_kept([10, 10, 10, 10], reuse_distance, max_live_numel) == kept


# -- reductions ---------------------------------------------------------------------------------------------


class Counted(Handle):
    def __init__(self, handle: Handle, counts: list[int]) -> None:
        self._handle, self._counts = handle, counts
        counts[0] += 1
        counts[1] = max(counts)

    def wait(self) -> None:
        self._handle.wait()
        self._counts[0] -= 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def reductions_at_once(stage: int, overlaps: bool) -> int:
    engine = xds.initialize(Model(recomputes=False), config(stage, zero={"overlap_comm": overlaps}))
    group, counts = engine._sharded.flat_groups.data.collectives, [0, 0]
    start = group.reduce_scatter
    group.reduce_scatter = lambda *args, **how: Counted(start(*args, **how), counts)
    for step in range(2):
        engine.backward(engine(torch.full((2, WIDTH), 1.0 + step)))
        engine.step()
    engine.destroy()
    assert counts[0] == 0
    return counts[1]


def sums_across_at_once() -> int:
    """Over the two replicas of MiCS."""
    engine = xds.initialize(Model(recomputes=False), config(3, zero={"mics_shard_size": 2}))
    group, counts = engine._sharded.flat_groups.data.levels.across, [0, 0]
    start = group.all_reduce
    group.all_reduce = lambda *args, **how: Counted(start(*args, **how), counts)
    for step in range(2):
        engine.backward(engine(torch.full((2, WIDTH), 1.0 + step)))
        engine.step()
    engine.destroy()
    assert counts[0] == 0
    return counts[1]


def test_few_sums_are_on_their_way_to_replicas() -> None:
    assert run_ranks(sums_across_at_once, 4) == [3] * 4


@pytest.mark.parametrize("stage", [1, 3])
def test_few_reductions_are_in_flight(stage: int) -> None:
    assert run_ranks(reductions_at_once, 2, stage, True) == [REDUCTIONS_IN_FLIGHT + 1] * 2
    assert run_ranks(reductions_at_once, 2, stage, False) == [1] * 2
