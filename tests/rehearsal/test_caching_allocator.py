"""The model of torch's allocator on traces that are small enough to follow by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caching_allocator import MIB, CachingAllocator, OutOfMemory, replay, smallest_device
from device_ranks import ranks
from test_rehearsal import batch, build, config_of


def test_sizes_of_segments() -> None:
    for num_bytes, reserved in [(1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB + 1, 12)]:
        allocator = CachingAllocator()
        allocator.allocate("a", num_bytes)
        assert allocator.reserved == reserved * MIB
        assert allocator.allocated == -(-num_bytes // 512) * 512


def test_the_best_block_is_split_and_joined_again() -> None:
    mib = [f"alloc a {30 * MIB} 0", f"alloc b {20 * MIB} 0", "free a", "free b"]
    assert replay(mib).reserved == 50 * MIB
    # 12 of the 20; then 25 of the 30; the rest of the 20 serves 8, and joined again it serves 20
    more = [f"alloc c {12 * MIB} 0", f"alloc d {25 * MIB} 0", f"alloc e {8 * MIB} 0"]
    assert replay(mib + more).reserved == 50 * MIB
    again = [*mib, *more, "free c", "free e", f"alloc f {20 * MIB} 0"]
    assert replay(again).reserved == 50 * MIB
    assert replay([*mib, *more, "free c", f"alloc f {20 * MIB} 0"]).reserved == 70 * MIB


def test_blocks_stay_with_their_stream_and_pool() -> None:
    lines = [f"alloc a {30 * MIB} 0", "free a", f"alloc b {30 * MIB} 1"]
    assert replay(lines).reserved == 60 * MIB
    gathered = [f"alloc a {30 * MIB} 0", "free a", f"alloc b {30 * MIB} 0 gathered"]
    assert replay(gathered).reserved == 30 * MIB
    assert replay(gathered, pools=True).reserved == 60 * MIB


def test_a_full_device_returns_free_segments_first() -> None:
    lines = [f"alloc a {30 * MIB} 0", "free a", f"alloc b {40 * MIB} 0"]
    assert replay(lines).most_reserved == 70 * MIB
    assert replay(lines, limit=40 * MIB).reserved == 40 * MIB
    with pytest.raises(OutOfMemory):
        replay(lines, limit=39 * MIB)
    assert smallest_device(lines, 1) == 40 * MIB
    # b holds its segment, in which 30 are free: 20 + 40 are in use
    held = [f"alloc a {30 * MIB} 0", "free a", f"alloc b {11 * MIB} 0", f"alloc c {40 * MIB} 0"]
    assert smallest_device(held, 1) == pytest.approx(70 * MIB, rel=0.01)


def states(config: dict[str, Any]) -> list[int]:
    """The optimizer's states after a forward without gradients, after one with; masters; frees of a step."""
    import xds

    engine = xds.initialize(build(), config)
    dtype = next(engine.module.parameters()).dtype
    inputs = batch(0, engine.device, dtype)
    with torch.no_grad():
        engine(inputs)
    found = [sum(map(bool, engine.optimizer.state.values()))]
    loss = engine(inputs).float().square().mean()
    found.append(sum(map(bool, engine.optimizer.state.values())))
    engine.backward(loss)
    ops = torch.ops.host_cuda
    ops.log_memory(True)
    ops.take_log()
    engine.step()
    ops.log_memory(False)
    log = [line.split() for line in ops.take_log()]
    freed = [name for kind, name, *_ in log if kind == "free"]
    found += [len(engine._parts.updater.masters), len(freed)]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_what_stays_is_not_among_activations(stage: int) -> None:
    """States come before the first activation; gradient buffers are allocated again after the first update."""
    config = config_of(stage, "bf16", 1) | {"ops": {"native": True}}
    for before, after, num_masters, num_freed in ranks(2, kernels=True).run(states, config):
        assert before == 0
        assert after == num_masters
        assert num_freed >= num_masters
